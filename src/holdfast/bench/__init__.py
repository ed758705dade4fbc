"""`holdfast bench`: many runs over the tasks of a suite, and what they reach next to published figures.

A suite is a file of plain data. `suite.py` reads it, `jobs.py` lists its runs, `pool.py` trains them in several processes,
`results.py` keeps one line per finished run, and `table.py` and `page.py` show them.
"""
