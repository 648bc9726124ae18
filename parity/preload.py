"""Imported once, by the server that rank processes are forked from: the code and tables that they share."""

from contextlib import suppress

import torch

from fp4ep.reference.special import ex2_approx, rcp_approx

from . import launch  # noqa: F401

with suppress(RuntimeError):  # a table that does not rebuild: for the rank that needs it to say
    for _function in (ex2_approx, rcp_approx):
        _function(torch.ones(1))
