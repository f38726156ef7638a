"""Model operations worked out by hand: what the utilisation metric divides."""

from types import SimpleNamespace

from areal_hpc.trainer.flops import model_flops

SHAPE = dict(
    model_type="qwen3", hidden_size=8, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=4,
    intermediate_size=16,
)  # fmt: skip
# Queries and output 8 x 16, keys and values 8 x 8: 384 weights; gate, up and down 8 x 16: 384.
LAYER, HEAD = 384 + 384, 8 * 10
# Half of 3 x 3 scores, and as many weights of values, each 16 multiplications and additions: 2 * 16 * 9 a layer.
SCORES = 2 * 288


def test_dense_model():
    assert model_flops(SimpleNamespace(**SHAPE), 3, 10) == 2 * 3 * (2 * LAYER + HEAD) + SCORES == 10272


def test_a_critic_has_one_output():
    assert model_flops(SimpleNamespace(**SHAPE), 3, 1) == 2 * 3 * (2 * LAYER + 8) + SCORES == 9840


def test_a_token_meets_its_experts_and_the_router():
    shape = SHAPE | dict(model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=6)
    layer = 384 + 2 * 3 * 8 * 6 + 8 * 4
    assert model_flops(SimpleNamespace(**shape), 3, 10) == 2 * 3 * (2 * layer + HEAD) + SCORES == 9504
