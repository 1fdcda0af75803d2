"""Run lesson 11, and write what it measured into one HTML file, so that a class can compare.

    bash scripts/lesson_11.sh --report FILE.html [flags of the lesson]

The file needs no other file: the figure is inside. It appears at once, or not at all.
"""

import argparse
import base64
import contextlib
import html
import importlib.util
import io
import json
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "lessons"))
import lesson_11_how_fast as lesson
import torch

PUBLISHED = """\
ResNet-34 on 1, 2, 4, 8 GPUs: 9, 5.5, 3, 2 s for an epoch
    (WZMIAOMIAO, deep-learning-for-image-processing, train_multi_GPU)
ImageNet on 4 V100 with PCIe: DataParallel 4138 s, DDP 1188 s
    (from the figure in the README of tczhangzhi, pytorch-distributed). It is the same epoch, but by
    the scripts of that month with 2 loader processes for DataParallel, and 8 for DDP. The figure
    hints that loading was the limit: Horovod 1200 s, DDP 1188 s, mixed precision 1186 s
GPT-2 on 2 TITAN RTX, 200 steps, with NVLink: DataParallel 110.6 s, DDP 101.9 s;
    without NVLink: DDP 131.4 s (Hugging Face, Efficient Training on Multiple GPUs)
DDP with overlap compared with DDP without, on 32 GPUs: speed-up 38.0 % (ResNet-50) and 35.2 %
    (BERT) over nccl, 26.8 % and 21.5 % over gloo. On 256 GPUs a step of ResNet-50 over nccl took
    twice as long as on one: a speed-up of 128, half of linear; over gloo a step slowed down about
    3 times (ResNet-50) and 6 times (BERT). Li et al., VLDB 2020, arXiv 2006.15704, 5.1 and 5.3"""


def draw(result):
    """Return a figure as PNG, in base64: the all-reduce, and the speed-ups."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shapes = list(lesson.SHAPES)
    figure, axes = plt.subplots(1, 1 + len(shapes), figsize=(13, 4))
    counts = sorted({n for n, *_ in result["all_reduce"]})
    for n, marker in zip(counts, "osD^v<>", strict=False):
        times = [(size, seconds) for k, size, seconds in result["all_reduce"] if k == n]
        fitted = [(s, t) for s, t in times if s in lesson.SIZES[::2] and n < max(counts[-1], 3)]
        tested = [pair for pair in times if pair not in fitted]
        for pairs, style, kind in ((fitted, "full", "fitted"), (tested, "none", "test")):
            if pairs:
                sizes, seconds = zip(*pairs, strict=True)
                measured = [1000 * t for t in seconds]
                look = {"color": "black", "fillstyle": style, "label": f"{n} ranks, {kind}"}
                axes[0].loglog(sizes, measured, marker, **look)
        sizes = [size for size, _ in times]
        guess = [1000 * lesson.predict_all_reduce(result["link"], n, size) for size in sizes]
        label = "the model" if n == counts[0] else None
        axes[0].loglog(sizes, guess, "-", color="0.6", label=label)
    axes[0].set(title="All-reduce: measured, and the model (lines)", xlabel="bytes", ylabel="ms")
    if counts:
        axes[0].legend(fontsize="small")
    for place, shape in zip(axes[1:], shapes, strict=True):
        rows = [row for row in result["rows"] if row["shape"] == shape]
        workers = [row["workers"] for row in rows]
        for row in rows[1:]:  # for one worker nothing is predicted
            label = "DDP, predicted" if row is rows[1] else None
            place.vlines(row["workers"], *row["predicted"], color="0.8", linewidth=12, label=label)
        for name, line in zip(lesson.VARIANTS[:3], (":s", "--^", "-o"), strict=True):
            speedup = [row["speedup"][name] for row in rows]
            place.plot(workers, speedup, line, color="black", label=name)
        place.set_xticks(workers)
        place.set(
            title=shape, xlabel="workers", ylabel="speed-up, one batch divided", ylim=(0, None)
        )
        place.legend()
    figure.tight_layout()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=100)
    return base64.b64encode(picture.getvalue()).decode()


def name_processor():
    """Return the processor's model, from Linux or from `platform`."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown processor"


def make_page(text, result):
    """Return the report as one HTML page."""
    cells = []
    for row in result["rows"]:
        names = lesson.VARIANTS[:3]
        times = [f"{statistics.median(row['ms'][name]):.3g}" for name in names]
        ranges = [f" ({min(row['ms'][name]):.3g} to {max(row['ms'][name]):.3g})" for name in names]
        speedups = [f"{row['speedup'][name]:.3g}" for name in names]
        guess = "{:.3g} to {:.3g}".format(*row["predicted"]) if row["predicted"] else ""
        columns = [row["shape"], row["workers"], *map("".join, zip(times, ranges, strict=True))]
        cells.append([*columns, *speedups, guess])
    head = ["model", "workers", *(f"{name}, ms" for name in lesson.VARIANTS[:3])]
    head += [*(f"speed-up, {name}" for name in lesson.VARIANTS[:3]), "DDP, predicted"]
    table = "".join(
        "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in line) + "</tr>\n"
        for tag, line in [("th", head), *(("td", line) for line in cells)]
    )
    machine = f"{platform.system()} {platform.machine()}, {name_processor()}, "
    affinity = getattr(os, "sched_getaffinity", None)  # the cores that we may use, as in the lesson
    machine += f"{len(affinity(0)) if affinity else os.cpu_count()} cores, "
    if torch.cuda.is_available():
        machine += f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, "
    machine += f"Python {platform.python_version()}, torch {torch.__version__}"
    numbers = html.escape(json.dumps(result))
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Lesson 11: how fast is it?</title>
<style>
body {{ font-family: sans-serif }}
th, td {{ padding: 0 1em 0 0; text-align: left }}
</style></head><body>
<h1>Lesson 11: how fast is it?</h1>
<p>{html.escape(machine)}</p>
<table>
{table}</table>
<p>Times are medians of {len(result["rows"][0]["ms"]["DDP"])} repeats (lowest to highest).</p>
<img alt="all-reduce times and speed-ups" src="data:image/png;base64,{draw(result)}">
<h2>What the lesson printed</h2>
<pre>{html.escape(text)}</pre>
<h2>Published figures</h2>
<pre>{html.escape(PUBLISHED)}</pre>
<h2>All numbers</h2>
<pre style="white-space: pre-wrap">{numbers}</pre>
</body></html>
"""


def main(argv):
    """Run the lesson and write the report; return the lesson's exit code."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--report", required=True)
    parser.add_argument("--json", action="store_true")
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: error: {message[:300]}\n")
    args, others = parser.parse_known_args(argv)
    path = Path(args.report)
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("argument --report: needs matplotlib: pip install matplotlib")
    try:
        with tempfile.TemporaryFile(dir=path.parent):  # the folder is there, and takes a file
            if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
                raise PermissionError(0, "it is not a file that can be written")
    except OSError as error:
        parser.error(f"argument --report: {error.strerror}: {path}")
    printed = io.StringIO()  # the lesson prints everything at its end
    try:
        with contextlib.redirect_stdout(printed):
            code = lesson.main([*others, "--json"])
    except SystemExit:  # --help, or a bad flag
        sys.stdout.write(printed.getvalue())
        raise
    *lines, numbers = printed.getvalue().splitlines()
    print("\n".join([*lines, numbers] if args.json else lines), flush=True)  # before it can fail
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(make_page("\n".join(lines), json.loads(numbers)), encoding="utf-8")
        part.replace(path)
    except OSError as error:
        sys.exit(f"can't write {path}: {error.strerror}")
    finally:
        part.unlink(missing_ok=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
