"""The report of one or several runs: a page of HTML, a picture, and tables.

From the bottom up: :mod:`.lines` reads the metrics of a run and :mod:`.run` its folder, and
:mod:`.positions` has where its steps lie; :mod:`.groups` groups runs, :mod:`.reached`,
:mod:`.shares` and :mod:`.tables` tell in numbers what they reached, :mod:`.curves` and
:mod:`.figures` draw it. None of these knows of HTML; :mod:`.page` puts them on a page.
:mod:`.picture` draws ``report.png``.
"""
