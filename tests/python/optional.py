"""torch and jax where they are installed, else None; and the marks that skip, with the reason, what needs them."""

import importlib
import importlib.util

import pytest


def load(name):
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


torch = load("torch")
jax = load("jax")
needs_torch = pytest.mark.skipif(torch is None, reason="torch is not installed")
needs_jax = pytest.mark.skipif(jax is None, reason="jax is not installed")
