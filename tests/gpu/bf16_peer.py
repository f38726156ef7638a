"""What the rank does in test_bf16.py: `bf16_peer.py MODELS DEVICE`, models of tests/mpi/trainer_models.py."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "mpi"))

from trainer_models import DENSE, TEMPERATURE, Oracle  # noqa: E402
from trainer_peers import LARGE, check_loss_scale, cut, loss_function  # noqa: E402

LOGPROB_TOLERANCE = 0.05
"""bf16 keeps 8 bits: logits of a few units are off by about 0.02; measured against fp32."""
MIN_COSINE = 0.99
"""Between a parameter's gradient in bf16 and in fp32. A wrong mask or shift gives below 0.9."""


def main(models: Path, device: str) -> None:
    from trainer_peers import Scene

    from areal_hpc.config.schema import OptimizerConfig
    from areal_hpc.trainer import parallel
    from areal_hpc.trainer.megatron import MegatronTrainer
    from areal_hpc.trainer.model import ModelOptions

    place = parallel.start(
        parallel.Layout(), rank=0, host="127.0.0.1", port=parallel.free_port(), device=device, timeout_s=60.0
    )
    scene = Scene.__new__(Scene)
    scene.place, scene.models = place, models
    # No experts: rounding to bf16 sends some tokens to another one, which is a jump and no error.
    for name, dtype in [*((name, torch.bfloat16) for name in DENSE), ("qwen2-tied", torch.float16)]:
        engine = MegatronTrainer(
            place, models / name, ModelOptions(dtype=dtype), temperature=TEMPERATURE,
            optimizer=OptimizerConfig(lr=LARGE, eps=LARGE, weight_decay=0.0, clip_grad=0.0), total_updates=10,
        )
        check_weights(models / name, engine)
        check_numbers(scene, engine, scene.oracle(name), name)
        print(f"{name} passed", flush=True)
    check_loss_scale(scene)


def check_weights(folder: Path, engine) -> None:
    """Exported bit for bit as loaded, in the training precision."""
    from safetensors.torch import load_file

    expected = load_file(folder / "model.safetensors")
    exported = {key: tensor.cpu() for key, tensor in engine.named_hf_tensors()}
    assert exported.keys() == expected.keys(), exported.keys() ^ expected.keys()
    for key, tensor in exported.items():
        assert torch.equal(tensor, expected[key].to(engine.options.dtype)), f"{key} differs"


def check_numbers(scene, engine, oracle: Oracle, name: str) -> None:
    """Packed log-probs, and the update of Adam at lr = eps, which is the gradient."""
    rows, numbers, denominator = scene.share(engine.hf.vocab_size)
    for index, values in engine.forward_logprobs(rows, cut(len(rows), "packed")).items():
        error = abs(values - oracle.logprobs[numbers[index]]).max()
        assert error < LOGPROB_TOLERANCE, f"{name} row {index}: log-probs differ by {error:.3f}"
    before = {key: tensor.float().cpu() for key, tensor in engine.named_hf_tensors()}
    seen = {"logprobs": {}, "entropies": {}}
    result = engine.train_minibatch(
        rows, cut(len(rows), "packed"), ["loss_mask", "weight"], loss_function(denominator, seen), entropy=True
    )
    assert not result.update.skipped
    assert abs(float(result.loss) - oracle.loss) < 0.02 * max(1.0, abs(oracle.loss)), (result.loss, oracle.loss)
    norm = float(torch.sqrt(sum(gradient.square().sum() for gradient in oracle.gradients.values())))
    assert abs(result.update.grad_norm / norm - 1.0) < 0.05, (result.update.grad_norm, norm)
    moved = {key: before[key] - tensor.float().cpu() for key, tensor in engine.named_hf_tensors()}
    for key, gradient in oracle.gradients.items():
        # Where the update is below bf16's resolution of the weight, nothing can be said.
        large = gradient.abs() > 0.02 * before[key].abs().clamp(min=1e-3)
        if large.sum() >= 32:
            cosine = torch.nn.functional.cosine_similarity(moved[key][large], gradient[large], dim=0)
            assert cosine > MIN_COSINE, f"{name} gradient of {key}: cosine {float(cosine):.3f}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
