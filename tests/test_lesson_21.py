"""Lesson 21: half precision on N ranks, and each part of it taken away."""

import pytest
from breaks import check_breaks
from lockstep import lessons

LESSON = lessons.find("21")
SOURCE = LESSON.script.read_text()

MEAN = "half = (bucket.buffer() / dist.get_world_size()).to(dtype)"
BACK = "bucket.buffer().copy_(done.value()[0])"
HALF = SOURCE[SOURCE.index(MEAN) : SOURCE.index(BACK)] + BACK
LATER = HALF.replace(" / dist.get_world_size()", "")
LATER = LATER.replace("done.value()[0]", "done.value()[0] / dist.get_world_size()")
ANYWHERE = "    return anywhere.item() > 0"
MAX, FINITE = "op=dist.ReduceOp.MAX", "finite = torch.stack"
DIVIDE = "            gradient /= self.factor\n"
SILENT = "contextlib.nullcontext() if last else replica.no_sync()"
LOSS = "loss = mse_loss(outputs.float(), targets) / len(micro_batches)"
UNSCALE = "    finite = scale.unscale(replica.parameters())"
CLIP = "        nn.utils.clip_grad_norm_(replica.parameters(), max_norm)\n"
HOOK, MODEL = "    replica.register_comm_hook(dtype, send_in)\n", "make_model(args.seed + rank)"
BREAKS = {
    "the weights are half, too": (f"{MODEL}.to(device)", f"{MODEL}.to(device, dtype)"),
    "no autocast": ("enabled=dtype != torch.float32", "enabled=False"),
    "autocast in the other type": ("type, dtype, enabled", "type, torch.bfloat16, enabled"),
    "no hook": (HOOK, ""),
    "sent in bfloat16, whatever is asked for": (".to(dtype)", ".to(torch.bfloat16)"),
    "the sum": (MEAN, "half = bucket.buffer().to(dtype)"),
    "half the sum": ("/ dist.get_world_size()).to", "/ 2).to", (3,)),
    "divided after the sum": (HALF, LATER),
    "rounded before it is divided": (
        MEAN,
        "half = bucket.buffer().to(dtype) / dist.get_world_size()",
    ),
    "the mean stays half": (BACK, "done.value()[0]"),
    "each rank decides by itself": (ANYWHERE, "    return bool(found)"),
    "skipped only where all ranks have inf": (MAX, MAX.replace("MAX", "MIN")),
    "nan is overlooked": ("gradient.isfinite()", "(~gradient.isinf())"),
    "inf is overlooked": ("gradient.isfinite()", "(~gradient.isnan())"),
    "one gradient is looked at": (
        "for gradient in gradients]).all",
        "for gradient in gradients[1:]]).all",
    ),
    "gradients are not divided": (DIVIDE, "            pass\n"),
    "divided twice": (DIVIDE, DIVIDE * 2),
    "the loss is not multiplied": ("(loss * scale.factor).b", "loss.b"),
    "the loss is half": (
        LOSS,
        LOSS.replace("outputs.float(), targets", "outputs, targets.to(dtype)"),
    ),
    "clipped before it is divided": (f"{UNSCALE}  # b", f"{CLIP[4:]}{UNSCALE}  # b"),
    "not clipped": (CLIP, ""),
    "nobody skips": ("    if finite:\n        nn", "    if True:\n        nn"),
    "everybody skips": ("    if finite:\n        nn", "    if not finite:\n        nn"),
    "the factor is never halved": ("self.factor /= 2", "pass"),
    "the factor never grows": ("self.factor * 2, 0", "self.factor, 0"),
    "good steps need not be in a row": ("self.good + 1 if finite else 0", "self.good + finite"),
    "the count goes on after it has grown": ("self.factor * 2, 0", "self.factor * 2, self.good"),
    "gradients pile up": ("    optimizer.zero_grad()\n", ""),
    "each micro-batch sends": (SILENT, "contextlib.nullcontext()"),
    "nobody sends": (SILENT, "replica.no_sync()"),
    "micro-batches are not divided": (LOSS, LOSS.replace(" / len(micro_batches)", "")),
    "past DDP": ("outputs = replica(rows)", "outputs = replica.module(rows)"),
    "first weights are not sent": ("Parallel(model)", "Parallel(model, init_sync=False)"),
    "all ranks take the same rows": ("x[rank::world_size]", "x[::world_size]"),
    "a layer is not trained": ("SGD(model.", "SGD(model[0]."),
    "every rank prints": ("    if rank == 0:\n        made", "    if True:\n        made"),
}


@pytest.mark.parametrize("nproc", (2, 3))
def test_each_break_ends_in_fail(nproc):
    check_breaks(21, BREAKS, nproc, "--steps", 8, "--rows", 4)
