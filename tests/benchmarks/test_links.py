"""Where links cannot be made slow, `benchmarks/links.py` says so, and does nothing."""

import os
import shutil
import sys

import pytest


@pytest.mark.parametrize(
    ("tools", "user", "wants"),
    [((), 0, "ip and tc"), (("ip",), 1000, "tc and root's rights")],
)
def test_what_is_missing_is_said_in_a_sentence(
    tools, user, wants, module, monkeypatch, capsys
):
    links = module("links")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(shutil, "which", lambda name: name if name in tools else None)
    monkeypatch.setattr(os, "geteuid", lambda: user, raising=False)
    monkeypatch.setattr(links, "Hosts", None)  # would be called
    links.main()
    said = f"Links cannot be made slow here: that needs {wants}. Nothing is done.\n"
    assert capsys.readouterr().out == said
