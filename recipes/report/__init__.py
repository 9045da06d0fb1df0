"""The report of one or several runs as a page of HTML, and as tables.

From the bottom up: :mod:`.lines` reads the metrics of a run and :mod:`.run` its folder;
:mod:`.positions`, :mod:`.curves`, :mod:`.thinning` and :mod:`.trust_ratios` prepare what is drawn;
:mod:`.groups`, :mod:`.intervals`, :mod:`.reached` and :mod:`.tables` what is told in numbers;
:mod:`.shares`, where the time went, is drawn and told. All of these are functions of the runs, and
know nothing of HTML. :mod:`.page` puts them on a page.
"""
