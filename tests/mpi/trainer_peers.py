"""What each trainer rank does in test_trainer.py: `trainer_peers.py SCENE TP PP DP EP MODELS RUN`."""

import os
import sys
from pathlib import Path

import numpy as np
import torch
from step_oracle import CASES, NUM_STEPS, apply_settings, make_batch, make_config, make_manifest
from trainer_models import ENTROPY_WEIGHT, TEMPERATURE, Oracle, make_rows

LARGE = 1.0e6
"""Adam's first step is lr * g / (|g| + eps): with lr = eps = 1e6 it is the gradient itself."""


class Scene:
    """This rank in its layout, with the models of the test."""

    def __init__(self) -> None:
        from areal_hpc.mpi.world import load_mpi
        from areal_hpc.trainer import parallel

        self.comm = load_mpi()
        self.rank = self.comm.Get_rank()
        tp, pp, dp, ep = map(int, sys.argv[2:6])
        self.models, self.run = Path(sys.argv[6]), Path(sys.argv[7])
        port = self.comm.bcast(parallel.free_port() if self.rank == 0 else None)
        self.place = parallel.start(
            parallel.Layout(tp, pp, dp, ep), rank=self.rank, host="127.0.0.1", port=port, device="cpu", timeout_s=60.0
        )

    def engine(self, name: str, *, train: bool = True, **options):
        from areal_hpc.config.schema import OptimizerConfig
        from areal_hpc.trainer.megatron import MegatronTrainer
        from areal_hpc.trainer.model import ModelOptions

        optimizer = OptimizerConfig(lr=LARGE, eps=LARGE, weight_decay=0.0, clip_grad=0.0) if train else None
        return MegatronTrainer(
            self.place, self.models / name, ModelOptions(**options), temperature=TEMPERATURE, optimizer=optimizer,
            total_updates=10,
        )

    def oracle(self, name: str) -> Oracle:
        return Oracle(**torch.load(self.models / f"{name}.oracle", weights_only=False))

    def share(self, vocab_size: int):
        """(this dp rank's rows, their numbers, trained tokens of all rows)."""
        from areal_hpc.trainer.batch import Row

        everything = make_rows(vocab_size)
        numbers = list(range(self.place.dp_rank, len(everything), self.place.layout.dp))
        rows = [
            Row(tokens, {"loss_mask": mask, "weight": weight})
            for tokens, mask, weight in (everything[number] for number in numbers)
        ]
        return rows, numbers, sum(int(mask.sum()) for _, mask, _ in everything)


def cut(num_rows: int, how: str) -> list[list[int]]:
    """Micro-batches: `packed` two, the second with all but one row; `single` one row each."""
    if how == "single":
        return [[index] for index in range(num_rows)]
    return [[0], list(range(1, num_rows)), []]


def loss_function(denominator: float, seen: dict):
    from areal_hpc.trainer.batch import unpack
    from areal_hpc.trainer.objective import LossOutput

    def loss(micro_batch, logprobs, entropies):
        seen["logprobs"] |= unpack(micro_batch, logprobs)
        seen["entropies"] |= unpack(micro_batch, entropies)
        value = micro_batch.values["weight"] * logprobs + ENTROPY_WEIGHT * entropies
        value = torch.where(micro_batch.loss_mask, value, 0.0)
        return LossOutput(-value.sum() / denominator, {}, {})

    return loss


def close(name: str, found, expected, tolerance: float = 1.0e-4) -> None:
    """Difference relative to the largest expected value."""
    found, expected = torch.as_tensor(found).double(), torch.as_tensor(expected).double()
    assert found.shape == expected.shape, f"{name}: shape {found.shape}, expected {expected.shape}"
    error = float((found - expected).abs().max() / expected.abs().max().clamp(min=1.0e-12))
    assert error < tolerance, f"{name}: relative difference {error:.2e}"


def check_weights(scene: Scene, engine, name: str) -> None:
    """Loaded and exported again bit for bit, as announced; nothing missing, nothing twice."""
    from safetensors.torch import load_file

    expected = load_file(scene.models / name / "model.safetensors")
    if name == "redundant-head":
        del expected["lm_head.weight"]
    exported = [(key, tensor.clone()) for key, tensor in engine.named_hf_tensors()]
    announced = [(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in exported]
    assert announced == engine.hf_metadata()
    assert len(dict(exported)) == len(exported), "a weight is exported twice"
    assert dict(exported).keys() == expected.keys(), dict(exported).keys() ^ expected.keys()
    for key, tensor in exported:
        assert torch.equal(tensor, expected[key]), f"{name}: {key} differs"


def check_training(scene: Scene, engine, name: str, how: str) -> None:
    """Log-probs, entropies, loss and every gradient against plain transformers and autograd."""
    oracle = scene.oracle(name)
    rows, numbers, denominator = scene.share(engine.hf.vocab_size)
    micro_batches = cut(len(rows), how)
    logprobs = engine.forward_logprobs(rows, micro_batches)
    if scene.place.is_last_stage:
        assert sorted(logprobs) == list(range(len(rows)))
    for index, values in logprobs.items():
        close(f"{name} log-probs of row {numbers[index]}", values, oracle.logprobs[numbers[index]])
    before = {key: tensor.clone() for key, tensor in engine.named_hf_tensors()}
    seen = {"logprobs": {}, "entropies": {}}
    result = engine.train_minibatch(
        rows, micro_batches, ["loss_mask", "weight"], loss_function(denominator, seen), entropy=True
    )
    for index, values in seen["entropies"].items():
        close(f"{name} entropy of row {numbers[index]}", values, oracle.entropies[numbers[index]])
    loss = scene.comm.allreduce(result.loss)
    close(f"{name} loss", [loss], [oracle.loss])
    after = dict(engine.named_hf_tensors())
    found = {key: before[key] - after[key] for key in before}
    missing = oracle.gradients.keys() ^ found.keys()
    assert not missing, f"{name}: {missing}"
    norm = float(torch.sqrt(sum(gradient.square().sum() for gradient in oracle.gradients.values())))
    close(f"{name} gradient norm", [result.update.grad_norm], [norm])
    for key, gradient in oracle.gradients.items():
        close(f"{name} gradient of {key}", found[key], gradient)


def check_skipped_update(scene: Scene, engine) -> None:
    """A gradient that is not finite on one rank: nothing changes on any, and all count it."""
    rows, numbers, denominator = scene.share(engine.hf.vocab_size)
    poison = {"logprobs": {}, "entropies": {}}
    plain = loss_function(denominator, poison)

    def loss(micro_batch, logprobs, entropies):
        output = plain(micro_batch, logprobs, entropies)
        bad = 0 in {numbers[index] for index in micro_batch.rows}
        return type(output)(output.loss * (float("nan") if bad else 1.0), output.sums, output.maxima)

    before = {key: tensor.clone() for key, tensor in engine.named_hf_tensors()}
    result = engine.train_minibatch(rows, cut(len(rows), "packed"), ["loss_mask", "weight"], loss, entropy=True)
    assert result.update.skipped and engine.num_skipped == 1
    assert all(torch.equal(before[key], tensor) for key, tensor in engine.named_hf_tensors())
    good = engine.train_minibatch(
        rows, cut(len(rows), "packed"), ["loss_mask", "weight"], plain, entropy=True
    )
    assert not good.update.skipped and np.isfinite(good.update.grad_norm)


def check_loss_scale(scene: Scene) -> None:
    """fp16: gradients come out of the scaled loss unscaled; an overflow on one rank is skipped on all and counted."""
    engine = scene.engine("qwen2-tied", dtype=torch.float16)
    rows, numbers, denominator = scene.share(engine.hf.vocab_size)
    plain = loss_function(denominator, {"logprobs": {}, "entropies": {}})

    def overflowing(micro_batch, logprobs, entropies):
        output = plain(micro_batch, logprobs, entropies)
        bad = 0 in {numbers[index] for index in micro_batch.rows}
        return type(output)(output.loss * (1.0e6 if bad else 1.0), output.sums, output.maxima)

    def update(loss):
        return engine.train_minibatch(rows, cut(len(rows), "packed"), ["loss_mask", "weight"], loss, entropy=True).update

    before = {key: tensor.clone() for key, tensor in engine.named_hf_tensors()}
    scale = float(engine.updater.optimizer.get_loss_scale())
    # The scale is halved at the second of two overflows.
    assert update(overflowing).skipped and update(overflowing).skipped
    assert engine.num_skipped == 2 and float(engine.updater.optimizer.get_loss_scale()) == scale / 2
    assert all(torch.equal(before[key], tensor) for key, tensor in engine.named_hf_tensors())
    good = update(plain)
    norm = float(torch.sqrt(sum(each.square().sum() for each in scene.oracle("qwen2-tied").gradients.values())))
    assert not good.skipped and engine.num_skipped == 2
    close("fp16 gradient norm", [good.grad_norm], [norm], 0.02)


def dense(scene: Scene) -> None:
    """Every dense family in this layout, packed; then the options."""
    from areal_hpc.trainer.model import padded_vocab_size
    from areal_hpc.trainer.parallel import Layout

    layout = scene.place.layout
    assert padded_vocab_size(151, 128, 2) == 256
    for name in ("qwen2-tied", "qwen2-one-kv-head", "qwen3", "llama-tied", "llama-scaled-rope", "redundant-head"):
        engine = scene.engine(name)
        if name == "qwen2-tied" and scene.place.is_last_stage:
            assert engine.module.vocab_size == 128 * -(-151 // (128 * layout.tp)) * layout.tp
        check_weights(scene, engine, name)
        check_training(scene, engine, name, "packed")
    # Not packed: one sequence per micro-batch gives the same.
    check_training(scene, scene.engine("qwen2-tied"), "qwen2-tied", "single")
    check_training(scene, scene.engine("qwen3", recompute=True), "qwen3", "packed")
    if layout.tp > 1:
        for name in ("qwen2-one-kv-head", "qwen3"):
            check_training(scene, scene.engine(name, sequence_parallel=True), name, "packed")
        check_training(
            scene, scene.engine("llama-tied", sequence_parallel=True, recompute=True), "llama-tied", "packed"
        )
    check_skipped_update(scene, scene.engine("qwen2-tied"))
    check_loss_scale(scene)
    if layout in (Layout(), Layout(tp=2)):
        experts(scene)


def experts(scene: Scene) -> None:
    """A model with experts, which are spread over ranks."""
    engine = scene.engine("qwen3-moe", sequence_parallel=scene.place.layout.tp > 1)
    check_weights(scene, engine, "qwen3-moe")
    check_training(scene, engine, "qwen3-moe", "packed")


def refuse(scene: Scene) -> None:
    """The engine applies the rules that `areal-hpc check` applies, to what transformers makes of a folder."""
    import json

    from areal_hpc.config.errors import ConfigError

    folder = scene.run / "sliding"
    folder.mkdir()
    model = json.loads((scene.models / "qwen2-tied" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**model, "use_sliding_window": True}))
    scene.models = scene.run
    try:
        scene.engine("sliding")
    except ConfigError as error:
        assert "sliding-window" in str(error)
    else:
        raise AssertionError("a model with sliding-window attention was built")


class Steps:
    """The training step on shards in this layout, with the settings of a case of step_oracle.CASES and others."""

    def __init__(self, scene: Scene, name: str, case: str = "plain", settings: dict[str, object] = {}) -> None:
        from areal_hpc.paths import RunPaths
        from areal_hpc.telemetry import Telemetry
        from areal_hpc.trainer.build import build_step
        from areal_hpc.trainer.checkpoint import Checkpoints

        self.scene, self.case, layout = scene, case, scene.place.layout
        self.paths = RunPaths(scene.run / name)
        self.config = make_config(scene.models, self.paths.root, case)
        self.config.trainer.tp, self.config.trainer.pp, self.config.trainer.dp = layout.tp, layout.pp, layout.dp
        apply_settings(self.config, settings)
        self.paths.create()
        telemetry = Telemetry(self.paths.spans("trainer", scene.rank))
        self.engine, self.step = build_step(self.config, scene.place, self.paths, telemetry)
        self.checkpoints = Checkpoints(self.config, self.paths, self.step.engines, 60.0)

    def train(self, step: int) -> dict[str, float]:
        from areal_hpc.spool.shard import ShardWriter

        shards = None
        if self.scene.rank == 0:
            writer = ShardWriter(self.paths.rollout_spool(0), self.config.run.name, 0)
            batch = make_batch(step, self.case)
            shards = tuple(self.paths.relative(writer.commit(batch[start::2]).path) for start in (0, 1))
        manifest = make_manifest(step, self.scene.comm.bcast(shards), self.scene.place.layout.dp, self.case)
        return self.step.run(manifest)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.engine.named_hf_tensors()}


def same_weights(what: str, found: dict, expected: dict, tolerance: float = 2.0e-5) -> None:
    for name, tensor in found.items():
        error = float((tensor - expected[name]).abs().max())
        assert error < tolerance, f"{what}: {name} differs by {error:.2e}"


def train_as_oracle(run: Steps, after_first=lambda: None) -> dict[str, torch.Tensor]:
    """Train what the oracle trained: its metrics at every step, and at the end its weights, which are returned."""
    expected, metrics = torch.load(run.scene.run / f"{run.case}.oracle", weights_only=False)
    for step, wanted in enumerate(metrics, start=1):
        found = run.train(step)
        for name, value in wanted.items():
            close(f"{run.case} step {step} {name}", [found[name]], [value], 1.0e-3)
        if step == 1:
            after_first()
    same_weights(f"{run.case} after two steps", run.weights(), expected)
    return expected


def steps(scene: Scene) -> None:
    """Two steps of every case against the oracle; with the plain one a checkpoint between them."""
    layout = scene.place.layout
    for case in CASES:
        if case != "plain":
            run = Steps(scene, f"{case}-{layout.tp}-{layout.pp}", case)
            train_as_oracle(run)
            if case == "gae":
                check_reports(run)
    mine = f"run-{layout.tp}-{layout.pp}-{layout.dp}"
    run = Steps(scene, mine)
    assert run.checkpoints.load_newest() == 0
    # Training goes on while it is written: what is saved must be what was.
    expected = train_as_oracle(run, after_first=lambda: run.checkpoints.save(1, 1))
    saved = run.checkpoints.wait(60.0)
    assert saved is not None and saved.train_step == 1

    # The next life begins from the checkpoint of another layout, if there is one.
    origin = scene.run / "run-1-1-1"
    if layout.size > 1:
        import shutil

        if scene.rank == 0:
            shutil.copytree(origin / "checkpoints", scene.run / f"{mine}-resumed" / "checkpoints")
        scene.comm.Barrier()
        resumed = Steps(scene, f"{mine}-resumed")
    else:
        resumed = Steps(scene, mine)
    assert resumed.checkpoints.load_newest() == 1
    resumed.train(2)
    if layout.size > 1:
        same_weights("resumed", resumed.weights(), expected)
    else:
        before = run.weights()
        assert all(torch.equal(tensor, before[name]) for name, tensor in resumed.weights().items())


def damaged(scene: Scene) -> None:
    """Damage that one rank meets refuses the batch on all, and nothing of it is trained."""
    from areal_hpc.spool.schema import ShardError
    from areal_hpc.trainer import reading

    run = Steps(scene, "damaged")
    before = run.weights()
    real = reading.read_rows

    def unreadable(path, *args, **kwargs):
        if scene.rank == 1:
            raise ShardError(f"shard {path} is not readable: zero-filled")
        return real(path, *args, **kwargs)

    reading.read_rows = unreadable
    try:
        run.train(1)
    except reading.BatchDamaged as error:
        assert len(error.damaged) == 2 and all("zero-filled" in reason for reason in error.damaged.values())
    else:
        raise AssertionError("the damaged batch was trained")
    reading.read_rows = real
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.weights().items())
    assert np.isfinite(run.train(1)["loss"])


def full(scene: Scene) -> None:
    """A checkpoint on a full disk says so, leaves the run as it was, and succeeds when there is space again."""
    run = Steps(scene, "full")
    run.train(1)
    filler = run.paths.checkpoints / "filler"
    for leave_bytes in (0, 20_000, 200_000):
        free = os.statvfs(run.paths.checkpoints)
        filler.write_bytes(bytes(free.f_bavail * free.f_frsize - leave_bytes))
        try:
            run.checkpoints.save(1, 1)
            run.checkpoints.wait(60.0)
        except (RuntimeError, OSError) as error:
            text = str(error)
            assert "disk full" in text and str(run.paths.checkpoints) in text and "bytes" in text, text
            print(leave_bytes, text)
        else:
            raise AssertionError("a checkpoint was written without space")
        filler.unlink()
        run = Steps(scene, "full")
        assert run.checkpoints.load_newest() == 0
        assert list(run.paths.checkpoints.iterdir()) == []
        run.train(1)
    run.checkpoints.save(1, 1)
    assert run.checkpoints.wait(60.0).train_step == 1
    assert Steps(scene, "full").checkpoints.load_newest() == 1


def check_reports(run: Steps) -> None:
    """Gradients of the critic that are not finite: it stays as it is, the policy learns, and both are reported;
    so is the utilisation, as of devices that do 1e9 operations a second."""
    from areal_hpc.trainer import critic, step
    from areal_hpc.trainer.flops import model_flops

    def weights() -> list[torch.Tensor]:
        return run.step.engines["critic"].snapshot()

    real, before = critic.value_loss, weights()
    critic.value_loss = lambda *args, **kwargs: real(*args, **kwargs) * float("nan")
    step.peak_flops = lambda device, dtype: 1.0e9
    found = run.train(NUM_STEPS)
    critic.value_loss = real
    assert found["critic_skipped_updates"] == 2 and found["skipped_updates"] == 0, found
    assert all(torch.equal(left, right) for left, right in zip(before, weights(), strict=True))
    assert np.isfinite(found["grad_norm"])
    # Forward, twice that backward, and the forward pass before the updates: policy and critic alike.
    lengths = [trajectory.num_tokens for trajectory in make_batch(NUM_STEPS)]
    operations = sum(4 * model_flops(run.engine.hf, length, outputs) for length in lengths for outputs in (151, 1))
    close("mfu", [found["mfu"]], [operations / found["seconds"] / (1.0e9 * run.scene.place.layout.size)])


def schedules(scene: Scene) -> None:
    """Learning rates of every update by formula, over a resume with another rate and past the end."""
    warmup, total, before, smallest = 2, 10, 5, 2.0e-3

    def expected(kind: str, lr: float, update: int) -> float:
        """`update` counts from 1."""
        if update <= warmup:
            return lr * update / (warmup + 1)
        done = min(1.0, (update - 1 - warmup) / (total - warmup))
        left = {"constant": 1.0, "linear": 1.0 - done, "cosine": (1.0 + np.cos(np.pi * done)) / 2}[kind]
        return lr if kind == "constant" else smallest + left * (lr - smallest)

    def rates(run: Steps, count: int) -> list[float]:
        run.engine.model.zero_grad_buffer()
        updates = [run.engine.updater.step() for _ in range(count)]
        assert not any(update.skipped for update in updates)
        return [update.lr for update in updates]

    for kind in ("constant", "linear", "cosine"):
        settings = {
            "trainer.optimizer.schedule": kind, "trainer.optimizer.min_lr": smallest, "run.total_steps": total // 2
        }
        run = Steps(scene, kind, settings=settings)
        close(kind, rates(run, before), [expected(kind, 1.0e-2, update + 1) for update in range(before)], 1.0e-6)
        run.checkpoints.save(1, 1)
        assert run.checkpoints.wait(60.0).train_step == 1
        resumed = Steps(scene, kind, settings=settings | {"trainer.optimizer.lr": 3.0e-2})
        assert resumed.checkpoints.load_newest() == 1
        after = [expected(kind, 3.0e-2, update + 1) for update in range(before, total + 2)]
        close(f"{kind}, resumed", rates(resumed, len(after)), after, 1.0e-6)


SCENES = {"dense": dense, "experts": experts, "refuse": refuse, "steps": steps, "damaged": damaged, "full": full,
          "schedules": schedules}

if __name__ == "__main__":
    torch.set_num_threads(1)
    scene = Scene()
    SCENES[sys.argv[1]](scene)
    from areal_hpc.trainer import parallel

    scene.comm.Barrier()
    parallel.stop()
    print(f"rank {scene.rank} passed", flush=True)
