"""Wrong attempts at the tasks of lesson 10, and words that their verdict must contain."""

import torch
import torch.distributed as dist

# --- Task 2 ---


def plain_mean(losses):
    return losses.mean()


def plain_sum(losses):
    return losses.sum()


def total_of(losses, dtype=torch.float64):
    rows = torch.tensor(float(len(losses)), dtype=dtype)
    dist.all_reduce(rows)
    return rows


def forgets_the_ranks(losses):
    return losses.sum() / total_of(losses)


def always_2_ranks(losses):
    return losses.sum() * 2 / total_of(losses)


def cached(losses):
    if not hasattr(cached, "total"):
        cached.total = total_of(losses)
    return losses.sum() * dist.get_world_size() / cached.total


def in_bfloat16(losses):
    return losses.sum() * dist.get_world_size() / total_of(losses, torch.bfloat16).double()


def in_float16(losses):
    return losses.sum() * dist.get_world_size() / total_of(losses, torch.float16).double()


def around_the_model(losses):
    total = total_of(losses)
    if len(losses) == 0:
        return torch.zeros((), dtype=torch.float64, requires_grad=True)
    return losses.sum() * dist.get_world_size() / total


def no_tensor(losses):
    return losses.sum().item()


def detached(losses):
    return losses.sum().detach()


# --- Tasks 3 to 6 ---


def constant(job):
    return 1.0


def last_loss(job):
    return job.ranks[0].loss[-1]


def fallen(job):
    return job.ranks[0].loss[0] - job.ranks[0].loss[-1]


def norm(job):
    return job.ranks[0].gradient[0].norm()


def length_of_the_step(job):
    return (job.ranks[0].after[0] - job.ranks[0].before[0]).norm()


def all_bytes(job):
    return sum(job.ranks[0].sent[0])


def gradients_apart(job):
    return (job.ranks[0].gradient[0] - job.ranks[1].gradient[0]).abs().max()


def off_in_the_first_step(job):
    return (job.ranks[0].gradient[0] - job.gradient_of_one_process(0)).abs().max()


def shared_texts(job):
    return len(set(job.ranks[0].texts[0]) & set(job.ranks[1].texts[0]))


def first_text_of_the_second_epoch(job):
    return job.ranks[0].texts[4][0]


def first_text_again(job):  # by chance also a right order does that
    return job.ranks[0].texts[0][0] == job.ranks[0].texts[4][0]


def sum_of_texts(job):
    return sum(job.ranks[0].texts[4])


def sums_off_from_one_process(job):
    return (job.ranks[0].gradient[0].sum() - job.gradient_of_one_process(0).sum()).abs()


def one_entry_off(job):
    return (job.ranks[0].gradient[0] - job.gradient_of_one_process(0))[0].abs()


def last_entry_off(job):
    return (job.ranks[0].gradient[0] - job.gradient_of_one_process(0))[-1].abs()


def norms_off(job):
    return (job.ranks[0].gradient[0].norm() - job.gradient_of_one_process(0).norm()).abs()


def sums_apart(job):
    return (job.ranks[0].after[-1].sum() - job.ranks[1].after[-1].sum()).abs()


def one_entry_apart(job):
    return (job.ranks[0].after[-1] - job.ranks[1].after[-1])[40].abs()


def equally_many_dropped(job):
    zero, one = (rank.dropped[0][0].sum() for rank in job.ranks[:2])
    return zero == one


def one_feature_dropped_alike(job):
    return sum(
        job.ranks[0].dropped[step][0][7] != job.ranks[1].dropped[step][0][7] for step in (0, 1)
    )


def sums_of_texts_apart(job):
    return abs(sum(job.ranks[0].texts[0]) - sum(job.ranks[0].texts[4]))


def no_number(job):
    return torch.nan


TELLS_NOT = "it does not tell job "
WRONG = {
    "ratio_of_weights": {
        "equal": (1, "one count for all ranks"),
        "the other way round": (80 / 120, "which rank has fewer tokens"),
        "by the number of micro-batches": (3 / 2 + 0.1, "each rank's mean counts one half"),
    },
    "loss_for_backward": {
        "the mean of its own rows": (plain_mean, "with parts of [1, 4] rows"),
        "the sum of its own rows": (plain_sum, "with parts of [6, 6] rows"),
        "forgets that an average follows": (forgets_the_ranks, "with parts of [6, 6] rows"),
        "2 ranks, always": (always_2_ranks, "with parts of [6, 6, 6] rows"),
        "counted once": (cached, "with parts of [1, 4] rows"),
        "counted in bfloat16": (in_bfloat16, "with parts of [1025, 1226] rows"),
        "counted in float16": (in_float16, "with parts of [1025, 1226] rows"),
        "around the model": (around_the_model, "what you return must be a tensor"),
        "no tensor": (no_tensor, "what you return must be a tensor"),
        "without its graph": (detached, "what you return must be a tensor"),
    },
    "number_for_1_and_2": {
        "always the same": (constant, f"{TELLS_NOT}1"),
        "the last loss": (last_loss, f"{TELLS_NOT}1"),
        "how far the loss has fallen": (fallen, f"{TELLS_NOT}1"),
        "the norm of the gradient": (norm, f"{TELLS_NOT}1"),
        "the length of the update": (length_of_the_step, f"{TELLS_NOT}1"),
        "how far the ranks are apart": (gradients_apart, f"{TELLS_NOT}1"),
        "bytes": (all_bytes, f"{TELLS_NOT}1"),
        "a sum compared": (sums_off_from_one_process, "where a sum is right"),
        "a norm compared": (norms_off, "where a sum is right"),
        "the first number compared": (one_entry_off, "each number but four"),
        "the last number compared": (last_entry_off, "each number but four"),
        "no number": (no_number, "which is no number"),
    },
    "number_for_3_and_4": {
        "the last loss": (last_loss, f"{TELLS_NOT}3"),
        "bytes of an update": (all_bytes, f"{TELLS_NOT}3"),
        "how far from one process": (off_in_the_first_step, "without gradient_of_one_process"),
        "the norm of the gradient": (norm, f"{TELLS_NOT}3"),
        "a sum compared": (sums_apart, "where a sum is right"),
        "one number compared": (one_entry_apart, "each number but four"),
    },
    "number_for_5": {
        "the last loss": (last_loss, f"{TELLS_NOT}5"),
        "how far the ranks are apart": (gradients_apart, f"{TELLS_NOT}5"),
        "how far from one process": (off_in_the_first_step, f"{TELLS_NOT}5"),
        "the norm of the gradient": (norm, f"{TELLS_NOT}5"),
        "how many are dropped": (equally_many_dropped, "drop equally many features, but others"),
        "one feature": (one_feature_dropped_alike, f"{TELLS_NOT}5"),
    },
    "number_for_6": {
        "the last loss": (last_loss, f"{TELLS_NOT}6"),
        "how far the ranks are apart": (gradients_apart, f"{TELLS_NOT}6"),
        "how far from one process": (off_in_the_first_step, f"{TELLS_NOT}6"),
        "texts that two ranks share": (shared_texts, f"{TELLS_NOT}6"),
        "a text of the second epoch": (first_text_of_the_second_epoch, f"{TELLS_NOT}6"),
        "the first text alone": (first_text_again, f"{TELLS_NOT}6"),
        "a sum of text numbers": (sum_of_texts, f"{TELLS_NOT}6"),
        "two sums compared": (sums_of_texts_apart, "where other texts have the same sum"),
    },
}


# Other right answers.


def mean_with_weight(losses):  # the mean of no rows is nan, but its gradient is 0
    return losses.mean() * len(losses) * dist.get_world_size() / total_of(losses)


def off_by_the_update(job):
    rank = job.ranks[-1]
    return ((rank.before[0] - rank.after[0]) / 0.5 - job.gradient_of_one_process(0)).norm()


def off_in_the_last_step(job):
    right = job.gradient_of_one_process(7)
    return torch.allclose(job.ranks[1].gradient[7], right, rtol=1e-9, atol=1e-12)


def apart(job):
    return max((rank.after[-1] - job.ranks[0].after[-1]).abs().max() for rank in job.ranks)


def apart_before(job):
    return torch.equal(job.ranks[0].before[-1], job.ranks[1].before[-1])


def who_sends(job):
    return job.ranks[0].sent[0].index(max(job.ranks[0].sent[0]))


def masks_equal(job):
    return torch.equal(job.ranks[0].dropped[-1][0], job.ranks[1].dropped[-1][0])


def same_texts_again(job):
    return len(set(job.ranks[0].texts[0]) & set(job.ranks[0].texts[4]))


RIGHT = {
    "loss_for_backward": [mean_with_weight],
    "number_for_1_and_2": [off_by_the_update, off_in_the_last_step],
    "number_for_3_and_4": [apart, apart_before, who_sends],
    "number_for_5": [masks_equal],
    "number_for_6": [same_texts_again],
}
