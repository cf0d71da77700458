"""polyhead.torch's modules that stand for torch.nn's: one of each with the same state, and what a report counted."""

import polyhead
from optional import torch

if torch is not None:
    import polyhead.torch

    OURS = {
        "MultiheadAttention": polyhead.torch.MultiheadAttention,
        "TransformerEncoderLayer": polyhead.torch.TransformerEncoderLayer,
    }



def counts(records):
    """By operator; all of them taken."""
    assert all(record.kernel in polyhead.kernels() for record in records), records
    ops = {}
    for record in records:
        ops[record.op] = ops.get(record.op, 0) + record.count
    return ops


def flat(outputs):
    return [out for out in (outputs if isinstance(outputs, tuple) else (outputs,)) if out is not None]


def pair(name, *arguments, **options):
    """nn's module and ours with its state."""
    theirs = getattr(torch.nn, name)(*arguments, **options)
    ours = OURS[name](*arguments, **options)
    assert ours.load_state_dict(theirs.state_dict(), strict=True).missing_keys == []
    theirs.load_state_dict(ours.state_dict(), strict=True)
    return theirs, ours
