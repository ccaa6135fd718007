"""Weights that are read together become rows of one tensor, without the owner of the weights noticing.

    merged [N_0 + N_1 + .., K]    one storage
    |param 0      |param 1 |..    the parameters of the Hugging Face module, views of it from now on

Parameters stay the objects they are: `state_dict()`, checkpoints and in-place updates are as before, and memory holds
each weight once. What re-points a parameter (`model.to(...)`, `load_state_dict(assign=True)`) ends the merge unnoticed,
which `is_merged` tells.
"""

from collections.abc import Sequence

import torch


def merge_rows(params: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensor [sum of rows, ...] that `params`, equal but for their number of rows, become views of.

    Parameters that are one tensor's consecutive rows already, as when another engine merged them, are left as they are.
    """
    if is_merged(params):
        first = params[0].detach()
        return first.as_strided((sum(len(param) for param in params), *first.shape[1:]), first.stride())
    merged = torch.cat([param.detach() for param in params])
    for param, rows in zip(params, merged.split([len(param) for param in params]), strict=True):
        param.data = rows
    return merged


def is_merged(params: Sequence[torch.Tensor]) -> bool:
    """Are these the consecutive rows of one tensor?"""
    first, end = params[0], params[0].data_ptr()
    for param in params:
        if param.data_ptr() != end or not param.is_contiguous():
            return False
        if param.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return False
        end += param.numel() * param.element_size()
    return True


def unmerge_rows(params: Sequence[torch.Tensor]) -> None:
    """Each of `params` in a storage of its own again, with the values it has now."""
    for param in params:
        param.data = param.detach().clone()
