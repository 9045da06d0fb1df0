"""The report of one or several runs: a page of HTML (:mod:`.page`), and a picture of one run.

:mod:`.runs` groups runs and tells in numbers what they reached, :mod:`.figures` draws them.
"""
