"""Memory of the plan against published sizes, Megatron's own accounting and arithmetic by hand."""

from dataclasses import replace

import pytest

from areal_hpc.config.errors import ConfigError
from areal_hpc.config.schema import Config, Device
from areal_hpc.launch.preflight import count_parameters
from areal_hpc.plan.lengths import LogNormal
from areal_hpc.plan.memory import (
    GIB,
    LEAD_COPY,
    engine_slots,
    memory_limit,
    rollout_memory,
    smallest_device,
    trainer_memory,
)
from areal_hpc.plan.rates import H800, estimate_rates, train_flops
from areal_hpc.plan.shape import find_shape, named_shape, read_shape

MOE = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 999, "moe_intermediate_size": 48, "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
}  # fmt: skip
DENSE = {
    "hidden_size": 48, "num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 3,
    "intermediate_size": 96, "vocab_size": 300, "tie_word_embeddings": True,
}  # fmt: skip


def config(**trainer) -> Config:
    made = Config()
    made.run.device, made.model.dtype, made.model.max_context = Device.cuda, "bfloat16", 8192
    made.trainer.micro_batch_tokens = 8192
    for name, value in trainer.items():
        setattr(made.trainer, name, value)
    return made


@pytest.mark.parametrize(
    "size,billions",
    [
        ("0.5B", 0.494),
        ("1.5B", 1.54),
        ("3B", 3.09),
        ("7B", 7.62),
        ("14B", 14.77),
        ("32B", 32.76),
        ("72B", 72.7),
    ],
)
def test_named_sizes_have_their_published_parameters(size, billions):
    assert named_shape(size).parameters / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize("model", [MOE, DENSE, DENSE | {"tie_word_embeddings": False}])
def test_parameters_agree_with_the_other_count(model):
    assert read_shape(model).parameters == count_parameters(model)


@pytest.mark.parametrize("dp", [1, 4, 32])
def test_states_take_what_megatron_documents(dp):
    """bf16 weights with fp32 gradients under the distributed optimizer: 6 + 12/d bytes per parameter."""
    shape = named_shape("7B")
    parts = trainer_memory(config(), shape, 80 * GIB, dp).parts
    states = parts["weights"] + parts["gradients"] + parts["optimizer"]
    assert states == pytest.approx(shape.parameters * (6 + 12 / dp), rel=1e-3)


@pytest.mark.parametrize("model", [MOE, DENSE, DENSE | {"tie_word_embeddings": False}])
@pytest.mark.parametrize("tp,pp,ep", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 4), (2, 1, 4)])
def test_layouts_hold_the_model_and_no_more_than_its_copies(model, tp, pp, ep):
    shape = read_shape(model)
    held = trainer_memory(config(tp=tp, pp=pp, ep=ep), shape, GIB, dp=4).parts["weights"] / 2
    if pp == 1:
        experts = shape.layers * shape.expert_parameters
        split = ep if ep > 1 else tp
        assert held == pytest.approx((shape.parameters - experts) / tp + experts / split, rel=0.01)
    else:  # the fullest stage: half of the layers and one vocabulary matrix
        layers = shape.layers * (shape.dense_parameters + shape.expert_parameters) / pp
        assert held == pytest.approx((layers + shape.embedding_parameters) / tp, rel=0.01)


def test_activations_by_hand_with_and_without_recompute():
    shape, tokens = named_shape("1.5B"), 8192
    parts = trainer_memory(config(), shape, 80 * GIB).parts
    attention = 3 * 12 * 128 + 3 * 2 * 128
    assert parts["activations"] == 28 * tokens * 2 * (6 * 1536 + attention + 3 * 8960)
    recomputed = trainer_memory(config(recompute=True), shape, 80 * GIB).parts
    one_layer = parts["activations"] // 28
    assert recomputed["activations"] == 28 * tokens * 2 * 1536 + one_layer
    # A long context has to fit, whatever the micro-batch.
    longer = config()
    longer.model.max_context = 16384
    assert trainer_memory(longer, shape, 80 * GIB).parts["activations"] == 2 * parts["activations"]


@pytest.mark.parametrize("size", ["1.5B", "7B"])
def test_the_lead_holds_a_copy_of_all_weights_where_training_goes_on_while_they_travel(size):
    shape, layout = named_shape(size), config(tp=2)
    plain = trainer_memory(layout, shape, 80 * GIB)
    layout.weights.overlap = True
    lead = trainer_memory(layout, shape, 80 * GIB)
    assert lead.parts == plain.parts | {LEAD_COPY: 2 * shape.parameters}  # not divided by tp
    # It lies on the first stage; a fuller last one stays what is shown.
    layout = config(pp=2, micro_batch_tokens=65536, recompute=True)
    plain = trainer_memory(layout, shape, 80 * GIB)
    layout.weights.overlap = True
    assert plain.parts["logits"] and trainer_memory(layout, shape, 80 * GIB).parts == plain.parts


def test_a_copy_that_does_not_fit_names_its_switch():
    layout = config(tp=8, pp=2, recompute=True, micro_batch_tokens=1024)
    layout.weights.overlap = True
    assert "weights.overlap=false" in trainer_memory(layout, named_shape("32B"), 24 * GIB).advice


def test_logits_split_over_tp_and_sit_on_the_last_stage():
    shape = named_shape("1.5B")
    one = trainer_memory(config(), shape, 80 * GIB).parts["logits"]
    assert one == 8192 * 151936 * 22  # a multiple of 128: no padding
    two = trainer_memory(config(tp=2), shape, 80 * GIB).parts["logits"]
    assert two == pytest.approx(one / 2, rel=0.01)


def test_the_first_stage_holds_the_micro_batches_in_flight():
    """1F1B: stage 0 of pp keeps pp micro-batches of 1/pp of the layers, as much as one stage alone."""
    shape = replace(named_shape("7B"), vocab=1024)
    alone = trainer_memory(config(), shape, 80 * GIB).parts["activations"]
    assert trainer_memory(config(pp=4), shape, 80 * GIB).parts["activations"] == alone


@pytest.mark.parametrize(
    "size,dtype,layout,words",
    [
        ("72B", "bfloat16", {}, "trainer.tp"),
        ("1.5B", "bfloat16", {"micro_batch_tokens": 65536}, "micro_batch_tokens"),
        ("7B", "bfloat16", {"tp": 8, "micro_batch_tokens": 262144, "recompute": False}, "recompute=true"),
    ],
)
def test_what_does_not_fit_says_what_to_change(size, dtype, layout, words):
    memory = trainer_memory(config(**layout), named_shape(size), 80 * GIB)
    assert not memory.fits and words in memory.advice


def test_what_fits_has_no_advice():
    assert trainer_memory(config(recompute=True), named_shape("1.5B"), 80 * GIB, dp=8).fits


def test_the_cache_takes_what_the_engine_leaves():
    made, shape = config(), named_shape("1.5B")
    assert shape.kv_bytes(2) == 28672  # 28 layers x 2 heads x 128 x (key and value) x 2 bytes
    memory = rollout_memory(made, shape, 80 * GIB)
    assert memory.total == pytest.approx(0.9 * 80 * GIB)
    assert memory.kv_tokens == memory.parts["KV cache"] // 28672
    assert memory.fits and memory.host == shape.parameters * 2
    split = config()
    split.rollout.tensor_parallel = 2
    assert rollout_memory(split, named_shape("7B"), 80 * GIB).parts["weights"] == named_shape("7B").parameters
    # More GPUs than key-value heads: each keeps a whole one.
    assert shape.kv_bytes(2, tensor_parallel=8) == 28672 // 2


def test_an_engine_without_room_for_one_sequence_does_not_fit():
    memory = rollout_memory(config(), named_shape("72B"), 80 * GIB)
    assert not memory.fits and "rollout.tensor_parallel" in memory.advice
    made = Config()
    made.rollout.kv_cache_gib = 0.001
    memory = rollout_memory(made, read_shape(DENSE | {"vocab_size": 64}), 64 * GIB)
    assert not memory.fits and "kv_cache_gib" in memory.advice


def test_slots_are_what_the_cache_holds_of_running_answers():
    made, lengths = config(), LogNormal(500, 4000, sigma=0.5)
    memory = rollout_memory(made, named_shape("1.5B"), 80 * GIB)
    assert engine_slots(made, memory, lengths, 100) == made.rollout.max_num_seqs == 64
    tight = replace(memory, kv_tokens=10_000)
    context = 100 + lengths.mean_square / lengths.mean / 2
    assert engine_slots(made, tight, lengths, 100) == int(10_000 / context)


def test_limits_of_both_devices():
    made = config()
    assert memory_limit(made, None) == (80 * GIB, 80 * GIB) and memory_limit(made, 24)[0] == 24 * GIB
    made.run.device = Device.cpu
    made.groups.trainer.mem_gib_per_node, made.groups.trainer.ranks_per_node = 64, 4
    assert memory_limit(made, None)[0] == 16 * GIB
    assert "24 GiB" in smallest_device(20 * GIB) and smallest_device(500 * GIB) == "none"


def test_rates_have_the_sizes_of_the_roofline():
    made, shape, lengths = config(), named_shape("1.5B"), LogNormal(5500, 27648)
    rates = estimate_rates(made, shape, lengths, 256, trainer_ranks=8)
    # Reading 3.1 GB at 3.35 TB/s takes 0.92 ms at least; nobody decodes this model faster than 3 ms a step.
    assert 0.92e-3 < rates.decode_base_s < 4e-3
    # 6 N operations per token is the textbook's update; attention and the proximal pass come on top.
    assert train_flops(made, shape, lengths, 256) > 8 * shape.parameters
    achieved = rates.train_tokens_s * train_flops(made, shape, lengths, 256)
    assert achieved == pytest.approx(8 * H800.flops * H800.train_part)
    half = estimate_rates(made, shape, lengths, 256, trainer_ranks=4)
    assert half.train_tokens_s == rates.train_tokens_s / 2
    made.algorithm.proximal = "interpolate"
    cheaper = estimate_rates(made, shape, lengths, 256, trainer_ranks=8)
    assert cheaper.train_tokens_s == pytest.approx(rates.train_tokens_s * 4 / 3)


def test_unknown_models_are_named(tmp_path):
    made = config()
    made.model.path = str(tmp_path)
    with pytest.raises(ConfigError, match="--model-size"):
        find_shape(made, None)
    with pytest.raises(ConfigError, match="1.6B.*1.5B"):
        find_shape(made, "1.6B")
    (tmp_path / "config.json").write_text('{"hidden_size": 3}')
    with pytest.raises(ConfigError, match="does not describe a decoder"):
        find_shape(made, None)
