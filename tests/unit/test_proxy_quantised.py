"""Quantised checkpoints are cut with their scales, read back right for calibration, and their config renumbered."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from proxy.build import build
from proxy.calibration import collect
from proxy.errors import BuildError
from proxy.quantised import mxfp4, scaled, to_float, unpack
from proxy.specs import BuildSpec
from tests.fixtures import tiny_moe as tiny

ROWS = tiny.rows(12)


def quantise_fp8(tensor: torch.Tensor, block: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 values and one factor a block, as DeepSeek-V3 has them (blocks of 8 x 8 here)."""
    rows, columns = tensor.shape
    padded = torch.zeros(-(-rows // block) * block, -(-columns // block) * block)
    padded[:rows, :columns] = tensor
    tiles = padded.reshape(len(padded) // block, block, -1, block)
    scale = tiles.abs().amax((1, 3)).clamp(min=1e-6) / 448
    values = (tiles / scale[:, None, :, None]).reshape(padded.shape)[:rows, :columns]
    return values.to(torch.float8_e4m3fn), scale


def dequantised(values: torch.Tensor, scale: torch.Tensor, block: int = 8) -> torch.Tensor:
    """The same as one product of Kronecker's."""
    rows, columns = values.shape
    return values.float() * torch.kron(scale, torch.ones(block, block))[:rows, :columns]


def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack unsigned values into 32-bit words in plain loops, the lowest bits first."""
    each = 32 // bits
    words = np.zeros((len(values), -(-values.shape[1] // each)), np.uint32)
    for i, row in enumerate(values.tolist()):
        for j, value in enumerate(row):
            words[i, j // each] |= np.uint32(value << (bits * (j % each)))
    return torch.from_numpy(words.view(np.int32).copy())


@pytest.fixture(scope="module")
def fp8(tmp_path_factory) -> tuple[Path, Path]:
    """A DeepSeek-V3 with FP8 experts and attention, and the same in float32."""
    home = tmp_path_factory.mktemp("fp8")
    quantised, plain = tiny.make_deepseek(home / "fp8"), tiny.make_deepseek(home / "plain")
    changes, same = {}, {}
    for name, tensor in tiny.load_all(quantised).items():
        if ".experts." in name or name.endswith(("o_proj.weight", "kv_b_proj.weight")):
            values, scale = quantise_fp8(tensor)
            changes |= {name: values, name.removesuffix("weight") + "weight_scale_inv": scale}
            same[name] = dequantised(values, scale)
    tiny.edit_tensors(quantised, changes)
    tiny.edit_tensors(plain, same)
    config = {
        "quant_method": "fp8",
        "weight_block_size": [8, 8],
        "modules_to_not_convert": ["lm_head", "model.layers.1.mlp.gate"],
    }
    tiny.edit_config(quantised, quantization_config=config)
    return quantised, plain


def test_fp8_calibration_is_that_of_the_dequantised_checkpoint(fp8):
    for a, b in zip(*(collect(folder, ROWS, 10_000) for folder in fp8), strict=True):
        assert np.array_equal(a.coactivation_EE, b.coactivation_EE)
        assert np.allclose(a.weighted_hidden_EH, b.weighted_hidden_EH, atol=1e-5)


def test_a_proxy_of_fp8_computes_what_the_masked_dequantised_original_computes(fp8, tmp_path):
    quantised, plain = fp8
    manifest = build(BuildSpec(str(quantised), str(tmp_path / "p"), 6), rows=ROWS)
    kept = {int(layer): entry["kept"] for layer, entry in manifest["layers"].items()}
    before, after = tiny.load_all(quantised), tiny.load_all(tmp_path / "p")
    for layer, experts in kept.items():
        for new, old in enumerate(experts):
            for rest in ("up_proj.weight", "down_proj.weight", "gate_proj.weight_scale_inv"):
                names = [f"model.layers.{layer}.mlp.experts.{e}.{rest}" for e in (new, old)]
                assert torch.equal(after[names[0]].view(torch.uint8), before[names[1]].view(torch.uint8))
    # the proxy's own bytes, dequantised, run as a plain checkpoint
    same = {
        name: dequantised(tensor, after[name.removesuffix("weight") + "weight_scale_inv"])
        for name, tensor in after.items()
        if tensor.dtype == torch.float8_e4m3fn
    }
    scales = {name: None for name in after if name.endswith("weight_scale_inv")}
    tiny.edit_tensors(tmp_path / "p", same | scales)
    config = tiny.read_config(tmp_path / "p")
    del config["quantization_config"]
    (tmp_path / "p/config.json").write_text(json.dumps(config))
    assert (tiny.logits(tmp_path / "p") - tiny.logits(plain, kept)).abs().max() <= 1e-5


@pytest.mark.parametrize("bits, zero_point", [(4, False), (4, True), (8, False)])
def test_packed_weights_are_read_back(bits, zero_point):
    generator = torch.Generator().manual_seed(bits)
    values = torch.randint(0, 2**bits, (16, 32), generator=generator)
    scale = torch.rand(16, 4, generator=generator) + 0.1
    zero = torch.randint(0, 2**bits, (16, 4), generator=generator)
    raw = {
        "x.weight_packed": pack(values, bits),
        "x.weight_scale": scale,
        "x.weight_shape": torch.tensor([16, 32]),
    }
    if zero_point:
        raw["x.weight_zero_point"] = pack(zero.T.contiguous(), bits).T.contiguous()
    expected = torch.empty(16, 32)
    for i in range(16):
        for j in range(32):
            offset = zero[i, j // 8] if zero_point else 2 ** (bits - 1)
            expected[i, j] = (values[i, j] - offset) * scale[i, j // 8]
    assert torch.allclose(to_float(raw, {})["x.weight"], expected)
    assert raw == {}


def test_words_that_are_not_filled_up_are_cut():
    values = torch.randint(0, 16, (3, 11))
    assert torch.equal(unpack(pack(values, 4), 4, 11), values.to(torch.int32))


def test_a_packed_checkpoint_is_cut_and_its_ignored_experts_renumbered(tmp_path):
    original = tiny.make_qwen(tmp_path / "o")
    plain = tiny.make_qwen(tmp_path / "plain")
    changes, same, plain_experts = {}, {}, (3, 5, 6)
    for name, tensor in tiny.load_all(original).items():
        if ".experts." in name and int(name.split(".")[5]) not in plain_experts:
            base = name.removesuffix("weight")
            scale = tensor.abs().amax(1, keepdim=True) / 7
            values = (tensor / scale).round().clamp(-8, 7).to(torch.int64)
            changes |= {
                name: None,
                base + "weight_packed": pack(values + 8, 4),
                base + "weight_scale": scale,
                base + "weight_shape": torch.tensor(tensor.shape),
            }
            same[name] = values * scale
    tiny.edit_tensors(original, changes)
    tiny.edit_tensors(plain, same)
    ignored = [f"model.layers.{layer}.mlp.experts.{e}.up_proj" for layer in (0, 1) for e in plain_experts]
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}}},
        "ignore": ["lm_head", "re:.*gate$", "model.layers.0.mlp.gate", *ignored],
    }
    tiny.edit_config(original, quantization_config=config)
    manifest = build(BuildSpec(str(original), str(tmp_path / "p"), 4), rows=ROWS)
    same_choice = build(BuildSpec(str(plain), str(tmp_path / "q"), 4), rows=ROWS)
    kept = {int(layer): entry["kept"] for layer, entry in manifest["layers"].items()}
    assert manifest["layers"] == same_choice["layers"]
    edited = tiny.read_config(tmp_path / "p")["quantization_config"]
    expected = ["lm_head", "re:.*gate$", "model.layers.0.mlp.gate"]
    for layer, experts in kept.items():
        names = {e: f"model.layers.{layer}.mlp.experts.{experts.index(e)}.up_proj" for e in experts}
        expected += [names[e] for e in plain_experts if e in experts]
    assert 3 < len(expected) < 9  # some of them stay, and some go
    assert edited == config | {"ignore": expected}
    before, after = tiny.load_all(original), tiny.load_all(tmp_path / "p")
    for new, old in enumerate(kept[1]):
        rest = "up_proj.weight" if old in plain_experts else "up_proj.weight_packed"
        names = [f"model.layers.1.mlp.experts.{e}.{rest}" for e in (new, old)]
        assert torch.equal(after[names[0]], before[names[1]])


def test_mxfp4_is_read_back_in_plain_loops():
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    blocks = torch.randint(0, 256, (2, 3, 2, 16), dtype=torch.uint8)
    scales = torch.randint(120, 134, (2, 3, 2), dtype=torch.uint8)
    plain = mxfp4(blocks, scales)
    assert plain.shape == (2, 64, 3)
    for e, r, b, v in [(0, 0, 0, 0), (1, 2, 1, 31), (0, 1, 1, 7), (1, 0, 0, 16)]:
        byte = int(blocks[e, r, b, v // 2])
        half = byte & 15 if v % 2 == 0 else byte >> 4
        value = table[half & 7] * (-1 if half & 8 else 1) * 2.0 ** (int(scales[e, r, b]) - 127)
        assert plain[e, 32 * b + v, r] == value


def test_an_mxfp4_checkpoint_is_cut_block_by_block(tmp_path):
    from bench.zoo import Kind, make

    wide = {"hidden_size": 32, "intermediate_size": 32}
    original, plain = (
        make(Kind("gpt_oss", wide), tmp_path / "o"),
        make(Kind("gpt_oss", wide), tmp_path / "plain"),
    )
    generator = torch.Generator().manual_seed(0)
    changes, same = {}, {}
    for name, tensor in tiny.load_all(original).items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = tensor.shape
            blocks = torch.randint(
                0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator
            )
            scales = torch.full((experts, rows, columns // 32), 124, dtype=torch.uint8)
            changes |= {name: None, f"{name}_blocks": blocks, f"{name}_scales": scales}
            same[name] = mxfp4(blocks, scales)
    tiny.edit_tensors(original, changes)
    tiny.edit_tensors(plain, same)
    tiny.edit_config(
        original, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    )
    manifest = build(BuildSpec(str(original), str(tmp_path / "p"), 6), rows=ROWS)
    assert manifest["layers"] == build(BuildSpec(str(plain), str(tmp_path / "q"), 6), rows=ROWS)["layers"]
    before, after = tiny.load_all(original), tiny.load_all(tmp_path / "p")
    plain_after = tiny.load_all(tmp_path / "q")
    for layer, entry in manifest["layers"].items():
        name = f"model.layers.{layer}.mlp.experts.gate_up_proj"
        for part in ("_blocks", "_scales"):
            assert torch.equal(after[name + part], before[name + part][entry["kept"]])
        assert torch.equal(mxfp4(after[f"{name}_blocks"], after[f"{name}_scales"]), plain_after[name])


def test_factors_of_a_tensor_a_row_and_a_group():
    values = torch.randn(6, 8).to(torch.float8_e4m3fn)
    for scale in (torch.tensor(2.0), torch.rand(6, 1), torch.rand(6, 2)):
        whole = scale.expand(6, 8) if scale.numel() in (1, 6) else scale.repeat_interleave(4, 1)
        assert torch.allclose(scaled(values, scale), values.float() * whole)


def test_what_is_not_understood_is_refused_and_says_what_works():
    with pytest.raises(
        BuildError, match=r"'x.qweight' is torch.int32, and how it is quantised is not known"
    ) as caught:
        to_float({"x.qweight": torch.zeros(2, 2, dtype=torch.int32)}, {})
    assert "random" in caught.value.mend
