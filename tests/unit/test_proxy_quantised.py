"""Quantised checkpoints are cut with their scales, read back right for calibration, and their config renumbered."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from proxy.build import build
from proxy.calibration import collect
from proxy.checkpoint import TensorInfo, check_finite, open_checkpoint
from proxy.errors import BuildError, CheckpointError
from proxy.families import understand
from proxy.quantisation_config import check_names, renumber
from proxy.quantised import mxfp4, scaled, to_float, unpack
from proxy.selection import Selection
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


@pytest.mark.parametrize("named", ["weight_scale_inv", "scale"])
@pytest.mark.parametrize("strategy", ["multi_view", "reap"])
def test_factors_that_are_powers_of_two_choose_the_same_experts(strategy, named, tmp_path):
    """E8M0 bytes are exponents: the same factors in float32, and the product, keep the same experts."""
    folders = {kind: tiny.make_deepseek(tmp_path / kind) for kind in ("bytes", "float", "plain")}
    changes: dict[str, dict] = {kind: {} for kind in folders}
    for name, tensor in tiny.load_all(folders["plain"]).items():
        if ".mlp.experts." in name or name.endswith("o_proj.weight"):
            scale = torch.pow(2, torch.log2(quantise_fp8(tensor)[1]).ceil())
            whole = torch.kron(scale, torch.ones(8, 8))[: tensor.shape[0], : tensor.shape[1]]
            values = (tensor / whole).to(torch.float8_e4m3fn)
            beside = name.removesuffix("weight") + named
            changes["bytes"] |= {name: values, beside: scale.to(torch.float8_e8m0fnu)}
            changes["float"] |= {name: values, beside: scale}
            changes["plain"][name] = dequantised(values, scale)
    kept = {}
    for kind, folder in folders.items():
        tiny.edit_tensors(folder, changes[kind])
        manifest = build(BuildSpec(str(folder), str(tmp_path / f"{kind}-p"), 6, strategy), rows=ROWS)
        kept[kind] = manifest["layers"]
    assert kept["bytes"] == kept["float"] == kept["plain"]


@pytest.mark.parametrize("strategy", ["multi_view", "first_k"])
def test_an_exponent_that_is_nan_is_refused(strategy, fp8, tmp_path):
    folder = shutil.copytree(fp8[0], tmp_path / "o")
    tensors = tiny.load_all(folder)
    exponents = {
        name: torch.pow(2, torch.log2(tensor).round()).to(torch.float8_e8m0fnu)
        for name, tensor in tensors.items()
        if name.endswith("_scale_inv")
    }
    tiny.edit_tensors(folder, exponents)
    build(BuildSpec(str(folder), str(tmp_path / "p"), 6, strategy), rows=ROWS)
    name = "model.layers.1.mlp.experts.0.up_proj.weight_scale_inv"
    exponents[name].view(torch.uint8)[0, 0] = 255
    tiny.edit_tensors(folder, {name: exponents[name]})
    with pytest.raises(CheckpointError, match=f"'{name}' .*NaN"):
        build(BuildSpec(str(folder), str(tmp_path / "q"), 6, strategy), rows=ROWS)


def test_mxfp4_exponents_are_checked_too():
    info = TensorInfo("x.down_proj_scales", "f", "U8", (4,), 0, 4)
    check_finite(bytes([0, 1, 127, 254]), info)
    with pytest.raises(CheckpointError, match="NaN"):
        check_finite(bytes([0, 255, 127, 254]), info)
    check_finite(bytes([255] * 4), replace(info, name="x.down_proj_blocks"))


def test_two_values_a_byte_are_not_taken_for_whole_numbers():
    packed = {
        "w1.weight": torch.zeros(4, 8, dtype=torch.int8),
        "w1.scale": torch.ones(4, 1).to(torch.float8_e8m0fnu),
    }
    with pytest.raises(BuildError, match="two 4-bit values a byte") as caught:
        to_float(packed, {})
    assert "first_k" in caught.value.mend


def test_packed_weights_of_another_kind_are_not_misread():
    nvfp4 = {
        "x.weight_packed": torch.zeros(4, 8, dtype=torch.uint8),
        "x.weight_scale": torch.ones(4, 1).to(torch.float8_e4m3fn),
    }
    with pytest.raises(BuildError, match=r"'x.weight_packed' is torch.uint8, and how it is quantised"):
        to_float(nvfp4, {"config_groups": {"g": {"weights": {"num_bits": 4}}}})
    assert list(to_float({"x.weight_blocks": torch.ones(2)}, {})) == ["x.weight_blocks"]


EXPERT_5 = "model.layers.0.mlp.experts.5.up_proj"


@pytest.fixture
def layout(tmp_path):
    return understand(open_checkpoint(tiny.make_qwen(tmp_path / "layout")))


def renumbered(section, layout):
    config = {"quantization_config": section}
    renumber(config, layout, {0: Selection((1, 5, 7), (1,) * 8), 1: Selection((0, 2, 3), (0,) * 8)})
    return config["quantization_config"]


def test_ids_are_renumbered_wherever_a_module_is_named(layout):
    gone = "model.layers.0.mlp.experts.4"
    before = {
        "extra_config": {EXPERT_5: {"bits": 16}, gone: {"bits": 8}, "lm_head": {"bits": 16}},
        "ignored_layers": EXPERT_5,
        "mixed": [None, 3, EXPERT_5, gone, {"name": gone, "other": 1}],
        "targets": ["Linear", "re:.*experts.*", "model.layers.7.mlp.experts.5.up_proj", "experts.5"],
    }
    after = renumbered(before, layout)
    new = "model.layers.0.mlp.experts.1.up_proj"
    assert after == {
        "extra_config": {new: {"bits": 16}, "lm_head": {"bits": 16}},
        "ignored_layers": new,
        "mixed": [None, 3, new, {"other": 1}],
        "targets": before["targets"],
    }


def test_ids_in_modelopts_own_file_are_renumbered(tmp_path):
    folder = tiny.make_qwen(tmp_path / "o")
    own = {
        "quantization": {
            "exclude_modules": ["lm_head", EXPERT_5],
            "quantized_layers": {EXPERT_5: {"algo": "FP8"}},
        }
    }
    (folder / "hf_quant_config.json").write_text(json.dumps(own))
    manifest = build(BuildSpec(str(folder), str(tmp_path / "p"), 6, "random", seed=3))
    kept = manifest["layers"]["0"]["kept"]
    assert 5 in kept and kept.index(5) != 5  # or the test shows nothing
    new = EXPERT_5.replace(".5.", f".{kept.index(5)}.")
    found = json.loads((tmp_path / "p/hf_quant_config.json").read_text())["quantization"]
    assert found == {"exclude_modules": ["lm_head", new], "quantized_layers": {new: {"algo": "FP8"}}}
    own["quantization"]["exclude_modules"].append("re:.*experts.5.*")
    (folder / "hf_quant_config.json").write_text(json.dumps(own))
    with pytest.raises(CheckpointError, match="names single experts by"):
        build(BuildSpec(str(folder), str(tmp_path / "q"), 6, "random"))


@pytest.mark.parametrize("shape", [(5000, 1), (0, 1)])
def test_factors_that_do_not_fit(shape):
    values = torch.zeros(16, 32).to(torch.float8_e4m3fn)
    with pytest.raises((BuildError, ArithmeticError), match=r"do not fit|by zero"):
        to_float({"x.weight": values, "x.weight_scale_inv": torch.ones(shape)}, {})


@pytest.mark.parametrize(
    "text",
    [
        r"re:model\.layers\.1\.mlp\.experts\.5\..*",
        "re:.*experts.(3|5).*",
        "re:.*experts.[35]",
        "layers.0.mlp.experts.5.up_proj",
        "+:.*experts\\.1[0-9]*",
    ],
)
def test_patterns_for_single_experts_are_refused(text, layout):
    for section in ({"ignore": ["lm_head", text]}, {"dynamic": {text: {"bits": 4}}}):
        with pytest.raises(CheckpointError, match="names single experts by") as caught:
            check_names({"quantization_config": section}, layout)
        assert "config.json" in caught.value.mend


@pytest.mark.parametrize(
    "text",
    [
        "re:.*experts.*",
        r"re:.*mlp\.experts\.\d+\..*",
        "re:.*experts.[0-9]+.down_proj",
        r"re:.*experts\.\d{1,3}\.up_proj",
        r"re:.*layers\.0\.mlp\.experts\..*w2",
        "re:.*shared_experts.*",
        "mtp.layers.0.mlp.experts.5.up_proj",
        EXPERT_5,
        "lm_head",
    ],
)
def test_patterns_for_all_experts_stand(text, layout):
    check_names({"quantization_config": {"ignore": [text], "dynamic": {text: 1}}}, layout)
    if text != EXPERT_5:
        assert renumbered({"ignore": [text]}, layout) == {"ignore": [text]}


def test_what_is_not_understood_is_refused_and_says_what_works():
    with pytest.raises(
        BuildError, match=r"'x.qweight' is torch.int32, and how it is quantised is not known"
    ) as caught:
        to_float({"x.qweight": torch.zeros(2, 2, dtype=torch.int32)}, {})
    assert "random" in caught.value.mend
