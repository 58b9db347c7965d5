"""DR.EHR and its companion papers, rebuilt on open data: one flat module for each concept the notebooks teach."""

__version__ = "0.1.0"
