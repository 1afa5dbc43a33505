"""Values that a job reports in addition to numbers: histograms, pictures, audio, texts, tables,
confusion matrices and curves.

`kinds` defines the kinds and their limits, `formats` checks files, `arrays` computes values with
numpy, and `values` converts what a script reports.
"""
