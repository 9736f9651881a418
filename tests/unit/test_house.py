"""What `make house` measures."""

from __future__ import annotations

import ast
import itertools

from tests.house.code import lines_of_code
from tests.house.imports import GRAPH, WEB, longest_chain
from tests.house.strangers import names_of_others


def test_a_line_of_code_is_one_that_is_no_comment_no_docstring_and_not_blank():
    source = '''"""A docstring.

Of several lines."""

import os  # this is one

# this is none
class A:
    """No code."""

    b = """
    code
    """
    """Below an attribute: no code."""
'''
    assert lines_of_code(source) == 5


def test_each_module_of_the_longest_chain_imports_the_next():
    chain = longest_chain()
    assert len(chain) > 10
    assert all(later in GRAPH[name] for name, later in itertools.pairwise(chain))


def test_only_the_command_that_serves_the_web_page_imports_it_and_only_the_group_of_commands_that_command():
    assert {name for name in GRAPH.keys() - WEB if GRAPH[name] & WEB} == {"cli.commands"}
    assert GRAPH["cli.commands"] & WEB == {"cli.web"}
    assert WEB.isdisjoint(longest_chain())


def test_a_private_name_is_a_strangers_where_no_class_of_ours_defines_it():
    tree = ast.parse("""
from celery import _state
class A:
    def _own(self): ...
    def a(self, pool):
        self._own(); self._of_base(); self._elsewhere(); pool._strange; getattr(pool, "_name", None); pool.undocumented
""")
    names = {"_state", "_of_base", "_strange", "_name", "undocumented"}
    assert names_of_others(tree, {"_elsewhere"}, {"undocumented"}) == names
