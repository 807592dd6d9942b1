"""The machine is compiled with warnings as errors for its own tests."""

import os

os.environ["CXXFLAGS"] = os.environ.get("CXXFLAGS", "") + " -Wall -Wextra -Werror"
