"""Folders of Parquet, JSON and CSV files, as a source and as a sink.

Lives here: everything about such folders. May not live here: offsets (see `log/`). Start reading in
`sink.py`.
"""
