"""The module that CMakeLists.txt writes."""

REASON: str
NO_LAUNCHER: str
SOURCES: str
LAUNCHER: str
