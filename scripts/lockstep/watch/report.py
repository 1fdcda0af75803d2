"""Tells what was found: for people, or as one line of JSON."""

import json
import re

from lockstep import ending
from lockstep.watch import findings
from lockstep.watch.findings import hang


def tell(args, job, ranks):
    """Print what was found in the jobs of a run; return the exit code."""
    if args.show:
        print(job.output, end="")
    problem = what_stopped_it(job, ranks)
    if problem and job.on_cpu and re.search("cuda", problem, re.IGNORECASE):
        problem += " (GPUs are played by the CPU, and this is not)"
    if problem:
        ending.say(f"check: {args.script} could not be run to the end: {problem}")
    report = findings.Report(stopped=bool(problem))
    started = args.nproc if job.launcher != "python" else None
    for one in ranks:
        findings.judge(one, report, started)
        if job.hung or (lost(one) and not problem):
            hang.judge(one, report)
    wrong = any(one.strength == findings.WRONG for one in report.findings)
    if not problem and not job.hung:
        problem = nothing_to_compare(args, job, ranks, wrong)
        if problem and not any(rank.group for one in ranks for rank in one.values()):
            report.findings.clear()  # who joins nobody can't do as others do
        if problem:
            ending.say(f"check: {args.script}: {problem}")
    code = 2 if problem else 1 if wrong else 0
    tell_as = as_json if args.json else as_text
    tell_as(args, job, ranks, report, code)
    return code


def what_stopped_it(job, jobs):
    """Return the reason why the script did not come to its end, or None.

    That ranks wait for each other is no such reason: it is a finding.
    """
    if job.hung and not jobs:
        return f"nothing has moved for {job.args.patience} s, and no rank has used torch"
    ranks = [rank for one in jobs for rank in one.values()]
    if job.hung or (ranks and all(rank.of("enough") for rank in ranks)):
        return None  # after --updates the ranks left; what the script misses then is no fault
    killed = re.search(r"rank \d+ failed: killed by SIG\w+", job.output)
    if job.code == 0 or (any(map(lost, jobs)) and not killed):
        return None
    lines = [line for line in job.output.splitlines() if line.strip()]
    told = [line for line in lines if " failed: " in line]
    said = (told or lines or [f"exit code {job.code}"])[-1]
    errors = [rank.error for one in jobs for rank in one.values() if rank.error]
    for error in sorted(errors, key=lambda error: error["at"]):
        if error["where"] and error["text"][:60] in said:
            return f"{said}, at {error['where']}"
    if by_cpp := re.search(r"rank (\d+) failed: killed by SIGABRT", said):
        why = re.search(r"what\(\): +(?:\[.*?\] )?(.*)", job.output)
        stack = next((of[rank].stack for of in jobs for rank in of if rank == int(by_cpp[1])), "")
        place, _ = hang.read(stack)
        said += (f": {why[1][:300]}" if why else "") + (f", at {place}" if place else "")
    return said


def nothing_to_compare(args, job, jobs, wrong):
    """Return why there is nothing to compare, or None."""
    if not any(rank.updates for job in jobs for rank in job.values()) and not wrong:
        words = [line for line in job.output.splitlines() if line.strip() and "note:" not in line]
        last = f" (it printed last: {words[-1].strip()[:200]})" if words else ""
        return f"no optimizer of torch.optim has made an update: there is nothing to compare{last}"
    joined = any(rank.group for job in jobs for rank in job.values())
    if joined or "distributed" in args.source or "accelerate" in args.source:
        return None
    return "it trains in one process, and joins no group: there is nothing to compare"


def lost(job):
    """Return whether ranks have failed, and all of them because they lost another or waited."""
    errors = [rank.error["text"] for rank in job.values() if rank.error]
    words = (ending.LOST, ending.LATE)
    return bool(errors) and all(any(word.search(text) for word in words) for text in errors)


def as_json(args, job, jobs, report, code):
    """Print one line of JSON; its keys are stable."""
    found = [
        one._asdict() | dict(zip(("cure", "lesson"), findings.KINDS[one.kind], strict=True))
        for one in report.findings
    ]
    facts = {"script": args.script, "exit_code": code, "started_by": job.launcher}
    facts |= {"ranks": [sorted(one) for one in jobs], "gpus_played_by_cpu": job.on_cpu}
    facts["updates"] = [[rank.count() for rank in one.values()] for one in jobs]
    facts |= {"findings": found, "looked_at": report.looked, "not_looked_at": report.blind}
    print(json.dumps(facts))


def as_text(args, job, jobs, report, code):
    """Print a report that one reads: what is wrong comes first."""
    ranks = " and ".join(str(len(one)) for one in jobs) or "no"
    made = [rank.most_updates() for one in jobs for rank in one.values()]
    print(
        f"{args.script}: {ranks} ranks, started by {job.launcher}, {max(made, default=0)} updates"
    )
    if job.on_cpu:
        print("GPUs were played by the CPU, nccl by gloo, mixed precision by float32")
    if job.renamed:
        print("the launcher of PyTorch 2 says --local-rank; it was handed over as --local_rank")
    for strength in findings.STRENGTHS:
        for one in report.findings:
            if one.strength == strength:
                tell_one(one)
    if not report.findings and code == 0:
        print("nothing was found")
    for text in report.looked:
        print(f"  looked at {text}")
    for text in report.blind:
        print(f"  not looked at {text}")


def tell_one(one):
    """Print a finding: what, where, what to do, which lesson."""
    cure, lesson = findings.KINDS[one.kind]
    who = f", rank {', '.join(map(str, one.ranks))}" if one.ranks else ""
    print(f"{one.strength.upper() if one.strength == findings.WRONG else one.strength}: {one.text}")
    place = one.place or "no line of yours"
    end = "" if not cure else " " if cure.endswith("?") else "; "
    print(f"    {place}{who}: {cure}{end}lesson {lesson}")
