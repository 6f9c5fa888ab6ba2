"""Convert a zoo of foreign networks and judge whether depth reaches the right places.

    python benchmarks/zoo.py [--out zoo.jsonl] [--only smp] [--limit 120] [--jobs 2]
    python benchmarks/zoo.py --table zoo.jsonl      # the table of docs/models.md, from what has been measured

Needs timm, torchvision and segmentation_models_pytorch, and transformers and ultralytics for their parts of the list.
Every network is built with random weights in a process of its own. What is in the file is not measured again.

A network is *exact* if its output on flat and on missing depth is that of the network before conversion. It is *well
placed* if it is exact, depth changes its output, no layer is in the decoder, neck or head, and at every rate from 8 on
that the encoder has (as timm's ``feature_info`` says, or as its convolutions show) a layer, or the block around it,
reads or writes a map, with at most eight layers in all. What comes before rate 8 may be a stem. It is well placed *in
part* if all this holds but for rates at which the encoder has no k × k convolution with overlapping windows, such as
stages of attention, and conversion warned of them. Any other fault is *misplaced*, or *warned* if there was a warning.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import multiprocessing
import random
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import malleable as mb

# ruff: noqa: SIM905  (names read better as words)
TIMM = """
bat_resnext26ts botnet26t_256 botnet50ts_256 caformer_s18 coat_lite_mini coat_lite_small coat_lite_tiny coat_mini
coat_small coat_tiny coatnet_0_224 coatnet_bn_0_rw_224 coatnet_nano_cc_224 coatnet_nano_rw_224 coatnet_pico_rw_224
coatnet_rmlp_0_rw_224 coatnet_rmlp_nano_rw_224 coatnext_nano_rw_224 convformer_s18 convmixer_1024_20_ks9_p14
convmixer_768_32 convnext_atto convnext_atto_ols convnext_atto_rms convnext_femto convnext_femto_ols convnext_nano
convnext_nano_ols convnext_pico convnext_pico_ols convnext_small convnext_tiny convnext_tiny_hnf
convnext_zepto_rms convnext_zepto_rms_ols convnextv2_atto convnextv2_femto cpubone_b0_bfrobust cpubone_b1_dwnorm
cpubone_nano cpubone_s0 cpubone_t0 crossvit_9_240 crossvit_9_dagger_240 crossvit_small_240 crossvit_tiny_240
cs3darknet_focus_s cs3darknet_s csatv2 csatv2_21m cspdarknet53 cspresnet50 cspresnet50d cspresnext50 darknet17
darknet21 darknetaa53 davit_tiny deit_tiny_patch16_224 densenet121 densenetblur121d dla34 dla46x_c dpn48b dpn68
eca_botnext26ts_256 eca_halonext26ts eca_nfnet_l0 eca_resnet33ts eca_resnext26ts eca_vovnet39b ecaresnet26t
ecaresnetlight ecaresnext26t_32x4d edgenext_small edgenext_small_rw edgenext_x_small edgenext_xx_small
efficientformer_l1 efficientformerv2_s0 efficientnet_b0 efficientnet_blur_b0 efficientnet_cc_b0_4e efficientnet_el
efficientnet_el_pruned efficientnet_em efficientnet_es efficientnet_es_pruned efficientnet_lite0 efficientnet_x_b3
efficientnetv2_rw_t efficientvim_m1 efficientvit_b0 efficientvit_l1 efficientvit_m0 ese_vovnet19b_dw
ese_vovnet19b_slim_dw fasternet_m fasternet_s fasternet_t0 fastvit_ma36 fastvit_mci0 fastvit_s12 fastvit_sa12
fastvit_t8 fbnetc_100 fbnetv3_b focalnet_tiny_lrf focalnet_tiny_srf gc_efficientnetv2_rw_t gcresnet33ts
gcresnet50t gcresnext26ts gcresnext50ts gcvit_xtiny gcvit_xxtiny gernet_l gernet_m gernet_s ghostnet_050
ghostnet_100 ghostnetv3_050 halo2botnet50ts_256 halonet26t halonet50ts haloregnetz_b hardcorenas_a hardcorenas_b
hardcorenas_c hardcorenas_d hardcorenas_e hardcorenas_f hgnet_small hgnet_tiny hgnetv2_b0 hrnet_w18
hrnet_w18_small inception_next_atto inception_resnet_v2 inception_v3 inception_v4 lambda_resnet26rpt_256
lambda_resnet26t lamhalobotnet50ts_256 lcnet_035 lcnetv2_small legacy_seresnet18 legacy_seresnext26_32x4d
legacy_xception levit_128s levit_conv_128s lowformer_b0 lowformer_e1 mambaout_femto mambaout_kobe mambaout_tiny
maxvit_nano_rw_256 maxvit_pico_rw_256 maxvit_rmlp_nano_rw_256 maxvit_rmlp_pico_rw_256 maxvit_rmlp_tiny_rw_256
maxvit_tiny_pm_256 maxvit_tiny_rw_224 maxvit_tiny_tf_224 maxxvit_rmlp_nano_rw_256 maxxvit_rmlp_tiny_rw_256
maxxvitv2_nano_rw_256 mixer_s32_224 mixnet_l mixnet_m mixnet_s mixnet_xl mixnet_xxl mnasnet_050 mnasnet_small
mobilenet_edgetpu_100 mobilenet_edgetpu_v2_xs mobilenetv1_100 mobilenetv2_035 mobilenetv3_large_100
mobilenetv3_small_050 mobilenetv4_conv_small mobilenetv4_hybrid_medium mobileone_s0 mobileone_s1 mobilevit_s
mobilevit_xs mobilevit_xxs mobilevitv2_050 mvitv2_tiny nasnetalarge nest_tiny nest_tiny_jx nextvit_small
nf_ecaresnet26 nf_regnet_b0 nf_resnet26 nf_seresnet26 nfnet_l0 pit_s_224 pit_s_distilled_224 pit_ti_224
pit_ti_distilled_224 pit_xs_224 pit_xs_distilled_224 pnasnet5large poolformer_s12 poolformerv2_s12 pvt_v2_b0
rdnet_tiny regnetv_040 regnetx_002 regnety_002 regnetz_005 regnetz_b16 regnetz_b16_evos regnetz_c16
regnetz_c16_evos regnetz_d8 regnetz_d8_evos repghostnet_050 repvgg_a0 repvgg_a1 repvgg_b0 repvgg_b1g4 repvit_m1
res2net50_14w_8s res2next50 resnest14d resnet10t resnet18 resnet26d resnet32ts resnet33ts resnet50 resnetaa34d
resnetblur18 resnetrs50 resnetv2_18 resnetv2_50x1_bit resnext26ts resnext50_32x4d rexnet_100 rexnet_150
rexnetr_100 sebotnet33ts_256 sedarknet21 sehalonet33ts selecsls42 semnasnet_050 seresnet18 seresnet33ts
seresnetaa50d seresnext26t_32x4d seresnext26ts shvit_s1 skresnet18 skresnext50_32x4d spnasnet_100 starnet_s050
swiftformer_l1 swiftformer_s swiftformer_xs swin_tiny_patch4_window7_224 test_byobnet test_convnext test_convnext3
test_efficientnet test_efficientnet_evos test_efficientnet_gn test_efficientnet_ln test_mambaout test_nfnet
test_resnet tf_efficientnet_b0 tf_efficientnet_cc_b0_4e tf_efficientnet_el tf_efficientnet_em tf_efficientnet_es
tf_efficientnet_lite0 tf_efficientnetv2_b0 tf_mixnet_l tf_mixnet_m tf_mixnet_s tf_mobilenetv3_small_075
tf_mobilenetv3_small_minimal_100 tiny_vit_5m_224 tinynet_a tinynet_b tinynet_c tinynet_d tinynet_e tresnet_m
twins_pcpvt_small twins_svt_small vgg11 vgg16 visformer_small visformer_tiny vit_tiny_patch16_224
vit_tiny_r_s16_p8_224 vitamin_small_224 volo_d1_224 vovnet39a xception41 xception41p xcit_nano_12_p16_224
""".split()

SMP = [
    f"{architecture} {encoder}"
    for architecture in (
        "Unet UnetPlusPlus MAnet Linknet FPN PSPNet DeepLabV3 DeepLabV3Plus PAN UPerNet Segformer".split()
    )
    for encoder in "resnet18 mit_b0 efficientnet-b0 timm-efficientnet-b0 mobilenet_v2 tu-convnext_atto".split()
    if encoder != "mit_b0" or architecture not in ("UnetPlusPlus", "Linknet", "DeepLabV3", "DeepLabV3Plus")
] + [
    f"Unet {encoder}"
    for encoder in "vgg11_bn densenet121 dpn68 se_resnet50 inceptionv4 xception mobileone_s0 timm-regnetx_002".split()
] + ["FPN tu-hrnet_w18_small", "DPT tu-vit_tiny_patch16_224"]  # fmt: skip

TORCHVISION = """
alexnet vgg11 vgg16_bn resnet18 resnet50 resnext50_32x4d wide_resnet50_2 regnet_x_400mf regnet_y_400mf densenet121
squeezenet1_0 squeezenet1_1 shufflenet_v2_x0_5 shufflenet_v2_x1_0 mobilenet_v2 mobilenet_v3_small mobilenet_v3_large
mnasnet0_5 mnasnet1_0 efficientnet_b0 efficientnet_b1 efficientnet_v2_s convnext_tiny googlenet inception_v3 maxvit_t
swin_t swin_v2_t vit_b_16 fcn_resnet50 deeplabv3_resnet50 deeplabv3_mobilenet_v3_large lraspp_mobilenet_v3_large
mnasnet0_75 retinanet_resnet50_fpn
""".split()

TRANSFORMERS = """
ConvNextModel ConvNextV2Model ResNetModel RegNetModel MobileNetV1Model MobileNetV2Model MobileViTModel MobileViTV2Model
EfficientNetModel SegformerModel SegformerForSemanticSegmentation PvtModel PvtV2Model CvtModel LevitModel
PoolFormerModel FocalNetModel BeitModel Swinv2Model BitModel GLPNForDepthEstimation DPTForDepthEstimation
DepthAnythingForDepthEstimation SwiftFormerModel TextNetModel HGNetV2Backbone UperNetForSemanticSegmentation
RTDetrResNetBackbone ViTModel Dinov2Model HieraModel MobileViTForSemanticSegmentation
MobileNetV2ForSemanticSegmentation MobileViTV2ForSemanticSegmentation AlignVisionModel PPLCNetBackbone
""".split()

ULTRALYTICS = """
yolov3-tiny yolov5n yolov6n yolov8n yolov8n-seg yolov8n-cls yolov8n-p2 yolov8n-ghost yolov9t yolov10n yolo11n
yolo11n-seg yolo11n-cls yolo12n yolo26n yolo26n-sem
""".split()

PACKAGES = ("timm", "segmentation_models_pytorch", "torchvision", "transformers", "ultralytics.nn.tasks")

SIZES = {"inception": 299, "xception": 299, "nasnet": 331}  # networks that do not pad lose the rates of small images

_BEHIND = re.compile(r"decoder|decode_head|neck|(^|\.)head|classifier|fpn|aspp|psp|segmentation|rpn|auxil|reassemble")
_CLOSE = 1e-4
_MOST = 8  # layers of a network; EfficientNet has seven stages


def build_timm(name: str) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(name)
    return model


def build_smp(name: str) -> nn.Module:
    import segmentation_models_pytorch as smp

    architecture, encoder = name.split()
    model: nn.Module = getattr(smp, architecture)(encoder, encoder_weights=None, classes=5)
    return model


def build_torchvision(name: str) -> nn.Module:
    from torchvision import models

    options: dict[str, Any] = {"weights": None}
    if "weights_backbone" in models.get_model_builder(name).__annotations__ or "retina" in name:
        options["weights_backbone"] = None
    if "retina" in name:
        options |= {"min_size": 128, "max_size": 128}
    model: nn.Module = models.get_model(name, **options)
    return model


def build_transformers(name: str) -> nn.Module:
    transformers = importlib.import_module("transformers")
    kind = getattr(transformers, name)
    options: dict[str, Any] = {}
    if name == "UperNetForSemanticSegmentation":
        stages = [f"stage{n}" for n in (1, 2, 3, 4)]
        widths = [96, 192, 384, 768]  # those of its default, which is a tuple where a list is needed
        options["backbone_config"] = transformers.ConvNextConfig(hidden_sizes=widths, out_features=stages)
    model: nn.Module = kind(kind.config_class(**options))
    return model


def build_ultralytics(name: str) -> nn.Module:
    tasks = importlib.import_module("ultralytics.nn.tasks")
    kinds = {"seg": tasks.SegmentationModel, "cls": tasks.ClassificationModel}
    kind = getattr(tasks, "SemanticModel", tasks.DetectionModel) if name.endswith("-sem") else None
    kind = kind or kinds.get(name.rpartition("-")[2], tasks.DetectionModel)
    model: nn.Module = kind(f"{name}.yaml", verbose=False)
    return model


ZOO: dict[str, tuple[Callable[[str], nn.Module], list[str]]] = {
    "timm": (build_timm, TIMM),
    "smp": (build_smp, SMP),
    "torchvision": (build_torchvision, TORCHVISION),
    "transformers": (build_transformers, TRANSFORMERS),
    "ultralytics": (build_ultralytics, ULTRALYTICS),
}


def enliven(model: nn.Module) -> nn.Module:
    """Draw norm weights and layer scales from 0.5 … 1.5, so that no branch hides behind a zero."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            vector = parameter.numel() == max(parameter.shape, default=1)
            if parameter.is_floating_point() and (vector and not name.endswith("bias")):
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    return model.eval()


def scene(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    image = torch.rand(1, 3, size, size, generator=generator)
    steps = torch.randint(0, 4, (1, 1, size // 8 + 1, size // 8 + 1), generator=generator).float()
    depth = steps.repeat_interleave(8, 2).repeat_interleave(8, 3)[..., :size, :size] + torch.linspace(1, 3, size)
    return image, depth


@torch.no_grad()
def measure(family: str, name: str) -> dict[str, Any]:
    """Build, convert, compare and judge one network."""
    torch.manual_seed(0)
    try:
        model = enliven(ZOO[family][0](name))
    except Exception as error:  # a network that cannot be built says nothing about conversion
        return {"verdict": "not built", "why": f"{type(error).__name__}: {error}"[:300]}
    own = next((size for part, size in SIZES.items() if part in name), 128)
    try:
        size, maps = _traced(model, own)
    except Exception as error:  # foreign code may fail in any way
        return {"verdict": "not built", "why": f"takes no image: {error}"[:300]}
    image, depth = scene(size)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            net = mb.convert(model)
        except (TypeError, ValueError) as error:
            return {"verdict": "refused", "why": str(error)[:600], "size": size}
    warned = [str(entry.message) for entry in caught if "to replace at rate" in str(entry.message)]
    errors = compare(model, net, image, depth)
    if not _shows_depth(errors) or max(errors["flat"], errors["missing"]) > _CLOSE:
        # Many random layers may leave little of the effect of depth, or make much of rounding.
        with warnings.catch_warnings(action="ignore"):
            double = mb.convert(model.double())
        errors = compare(model, double, image.double(), depth.double())
    placed = {layer.name: maps.get(layer.name, (0.0, 0.0)) for layer in net.placed}
    faults, bare = judge(family, model, placed, maps)
    if bare and not warned:
        faults.append(f"no warning that nothing is at rate {_listed(bare)}")
    if max(errors["flat"], errors["missing"]) > _CLOSE:
        faults.insert(0, "not exact")
    if not _shows_depth(errors):
        faults.append("depth has no effect")
    if "not exact" in faults:
        verdict = "not exact"
    elif faults:
        verdict = "warned" if warned else "misplaced"
    else:
        verdict = "in part" if bare else "warned" if warned else "good"
    rates = {layer.name: layer.rate for layer in net.placed}
    return {"verdict": verdict, "faults": faults, "size": size, "errors": errors, "placed": rates, "warned": warned}


def compare(model: nn.Module, net: nn.Module, image: Tensor, depth: Tensor) -> dict[str, float]:
    """Tell how far the output of ``net`` is from that of ``model``, on flat, missing and real depth."""
    original = model(image)
    depths = {"flat": torch.full_like(depth, 2.5), "missing": torch.zeros_like(depth), "scene": depth}
    focal = 0.8 * image.shape[-1]
    return {kind: _difference(net(image, depth=given, focal=focal), original) for kind, given in depths.items()}


def _shows_depth(errors: dict[str, float]) -> bool:
    return errors["scene"] > 10 * max(errors["flat"], errors["missing"])


def judge(
    family: str, model: Any, placed: dict[str, tuple[float, float]], maps: dict[str, tuple[float, float]]
) -> tuple[list[str], list[float]]:
    """Tell what is wrong with the places, given the rates that each convolution reads and writes.

    Rates that have no layer because they have no k × k convolution are the second list.
    """
    faults = []
    behind = [name for name in placed if _is_behind(family, model, name)]
    if behind:
        faults.append(f"in the decoder or head: {', '.join(behind)}")
    if all("stem" in name for name in placed):
        faults.append("only the stem")
    covered = [rate for name, rates in placed.items() for rate in (*rates, *_rates_around(model, name, maps))]
    expected = _expected_rates(family, model, maps)
    left_out = [rate for rate in expected if not any(0.7 < rate / other < 1.4 for other in covered if other)]
    bare = [rate for rate in left_out if rate not in _rates_with_convolutions(family, model, maps)]
    if len(left_out) > len(bare):
        faults.append(f"nothing at rate {_listed([rate for rate in left_out if rate not in bare])}")
    if len(placed) > _MOST:
        faults.append("too many")
    return faults, bare


def _listed(rates: list[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in rates)


def _rates_around(model: nn.Module, name: str, maps: dict[str, tuple[float, float]]) -> list[float]:
    """List the rates that the block around a convolution writes; a block has at most four k × k convolutions."""
    blocks = [name.rsplit(".", n)[0] for n in range(1, name.count(".") + 1)]
    convolutions = [other for other in maps if not other.endswith(":")]
    small = [block for block in blocks if sum(other.startswith(f"{block}.") for other in convolutions) <= 4]
    return [maps[f"{block}:"][1] for block in small if f"{block}:" in maps]


def _is_behind(family: str, model: Any, name: str) -> bool:
    if family == "ultralytics":  # layers are numbered, and the configuration says where the neck begins
        return int(name.split(".")[1]) >= len(model.yaml["backbone"])
    features = [entry["module"].split(".")[0] for entry in _feature_info(model)]  # SelecSLS calls its last ones head
    return _BEHIND.search(name) is not None and name.split(".")[0] not in features


def _expected_rates(family: str, model: Any, maps: dict[str, tuple[float, float]]) -> list[float]:
    """List the rates from 8 on that the encoder has."""
    modules = dict(model.named_modules())
    info = [entry for entry in _feature_info(model) if not isinstance(modules.get(entry["module"]), nn.MaxPool2d)]
    if family == "timm" and info:
        return sorted(float(entry["reduction"]) for entry in info if entry["reduction"] >= 8)
    return sorted(_rates_with_convolutions(family, model, maps))


def _feature_info(model: Any) -> list[dict[str, Any]]:
    info = getattr(model, "feature_info", None)
    return info if isinstance(info, list) else []


def _rates_with_convolutions(family: str, model: Any, maps: dict[str, tuple[float, float]]) -> set[float]:
    """Find the rates from 8 on, powers of two, that k × k convolutions of the encoder write."""
    convolutions = {name: module for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}
    rates = {
        2.0 ** round(math.log2(writes))
        for name, (_, writes) in maps.items()
        if name in convolutions and max(convolutions[name].kernel_size) > max(convolutions[name].stride)
        if writes > 1 and not _is_behind(family, model, name)
    }
    return {rate for rate in rates if rate >= 8}  # what comes before may be a stem


def _trace(model: nn.Module, image: Tensor) -> dict[str, tuple[float, float]]:
    """Tell the rates that each k × k convolution reads and writes, by name, in the order of execution.

    Other modules are among them with a colon behind their name.
    """
    seen: dict[str, tuple[float, float]] = {}
    handles = []
    for name, module in model.named_modules():
        looks = isinstance(module, nn.Conv2d) and max(module.kernel_size) > 1

        def note(module: nn.Module, args: Any, output: Any, name: str = name if looks else f"{name}:") -> None:
            maps = [value for value in (*args[:1], output) if isinstance(value, Tensor) and value.ndim == 4]
            if len(maps) == 2 and output.shape[-1] > 1:
                seen.setdefault(name, (image.shape[-1] / maps[0].shape[-1], image.shape[-1] / output.shape[-1]))

        handles.append(module.register_forward_hook(note))
    try:
        model(image)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _traced(model: nn.Module, first: int) -> tuple[int, dict[str, tuple[float, float]]]:
    """Find a size of image that ``model`` takes, ``first`` if it does, and trace it."""
    config = getattr(model, "config", None)
    own = (getattr(model, "pretrained_cfg", None) or {}).get("input_size", (3, 0, 0))[-1]
    own = own or getattr(config, "image_size", 0) or 0
    problem: Exception | None = None
    for size in (first, own if isinstance(own, int) else own[0], 224, 256):
        if size:
            try:
                return size, _trace(model, scene(size)[0])
            except Exception as error:  # foreign code may fail in any way
                problem = problem or error
    assert problem is not None
    raise problem


def _difference(actual: Any, expected: Any) -> float:
    """The largest difference between two outputs, of whatever structure, relative to the largest value."""
    actual, expected = _floats(actual), _floats(expected)
    if [a.shape for a in actual] != [e.shape for e in expected]:
        return math.inf
    pairs = [(a, e) for a, e in zip(actual, expected, strict=True) if e.numel()]
    return max((float((a - e).abs().max() / e.abs().max().clamp(min=1e-12)) for a, e in pairs), default=0.0)


def _floats(output: Any) -> list[Tensor]:
    if hasattr(output, "to_tuple"):
        output = output.to_tuple()
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _child(family: str, name: str, connection: Any) -> None:
    torch.set_num_threads(1)
    began = time.time()
    try:
        result = measure(family, name)
    except Exception as error:  # of a converted network: this is what the benchmark looks for
        result = {"verdict": "raises", "why": f"{type(error).__name__}: {error}"[:600]}
    connection.send({**result, "seconds": round(time.time() - began, 1)})


def run(out: Path, only: str | None, limit: float, jobs: int) -> None:
    """Measure what is not in ``out`` yet, ``jobs`` networks at a time."""
    known = {(row["family"], row["name"]) for row in rows(out)}
    zoo = [(family, name) for family, (_, names) in ZOO.items() for name in names if only in (None, family)]
    missing = [network for network in zoo if network not in known]
    random.Random(0).shuffle(missing)  # so that a run that is cut short is a fair sample
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", *PACKAGES])  # imported once, not by every process
    with ThreadPoolExecutor(jobs) as pool, out.open("a") as file:
        judged = {pool.submit(_judged, context, limit, network): network for network in missing}
        for future in as_completed(judged):
            (family, name), result = judged[future], future.result()
            file.write(json.dumps({"family": family, "name": name, **result}) + "\n")
            file.flush()
            print(f"{family:12} {name:40} {result['verdict']:10} {result.get('why', '')[:80]}", flush=True)


def _judged(context: ForkServerContext, limit: float, network: tuple[str, str]) -> dict[str, Any]:
    """Measure one network in a process of its own, which has ``limit`` seconds."""
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(*network, sender))
    process.start()
    sender.close()
    result: dict[str, Any] = {"verdict": "too slow", "why": f"took more than {limit:g} s"}
    try:
        if receiver.poll(limit):
            result = receiver.recv()
    except EOFError:
        result = {"verdict": "raises", "why": "the process died"}
    process.kill()
    process.join()
    return result


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def table(measured: list[dict[str, Any]]) -> Iterator[str]:
    """Write the table of docs/models.md: counts by family, and everything that is not well placed."""
    yield "| | built | exact | well placed | in part | warned | misplaced | refused |"
    yield "|---|---|---|---|---|---|---|---|"
    built = [row for row in measured if row["verdict"] != "not built"]
    for family in [*ZOO, None]:
        some = [row for row in built if family in (None, row["family"])]
        verdicts = Counter(row["verdict"] for row in some)
        exact = sum(verdicts[verdict] for verdict in ("good", "in part", "warned", "misplaced"))
        counts = (len(some), exact, *(verdicts[v] for v in ("good", "in part", "warned", "misplaced", "refused")))
        yield f"| {family or 'all'} | {' | '.join(map(str, counts))} |"
    yield ""
    reasons: dict[str, list[str]] = {}
    for row in built:
        if row["verdict"] != "good":
            reasons.setdefault(f"{row['verdict']}, {_reason(row)}", []).append(f"`{row['name']}`")
    for reason, names in sorted(reasons.items()):
        yield f"- {reason}: {', '.join(sorted(names))}"


def _reason(row: dict[str, Any]) -> str:
    """Say in a few words why a network is not well placed."""
    why: str = row.get("why") or "; ".join(row["warned"] or row["faults"])
    computed = re.search(r"got (\w+), which computes", why)
    missed = re.search(r"at (rate [\d., ]+)[:;]", why)
    if computed:
        return f"{computed[1]} computes its weights or output in its own way"
    if missed:
        return f"nothing to replace at {missed[1]}"
    return "no k×k convolution in stages on the way down" if "finds nothing" in why else why


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("zoo.jsonl"), help="where results are appended")
    parser.add_argument("--only", choices=ZOO, help="one part of the zoo")
    parser.add_argument("--limit", type=float, default=120, help="seconds for one network")
    parser.add_argument("--jobs", type=int, default=2, help="networks at a time, each on one core")
    parser.add_argument("--table", type=Path, help="write the table of this file and do nothing else")
    arguments = parser.parse_args()
    if arguments.table is None:
        run(arguments.out, arguments.only, arguments.limit, arguments.jobs)
    print("\n".join(table(rows(arguments.table or arguments.out))))


if __name__ == "__main__":
    main()
