"""Shared by all tests: the whole matrix is asked for by ONCEFLOW_TEST_ALL=1."""

import os

ALL = os.environ.get("ONCEFLOW_TEST_ALL") == "1"
