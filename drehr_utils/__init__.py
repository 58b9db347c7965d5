"""What the notebooks of this companion to DR.EHR share; see README.md."""

from drehr_utils import artifacts as artifacts  # first of all: it remembers each module's code as it is loaded

__version__ = "0.1.0"
