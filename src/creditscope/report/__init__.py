"""One html file that answers: what is wrong with this run, and where is the evidence.

    markup      text to html, escaped by construction
    run         a record as the report reads it: what is damaged is named, not fatal
    section     what a part of the page is
    answers     the first screen: four sentences by rule
    chart       Vega-Lite specifications as plain data
    page        sections to one file: style, scripts, data, and a policy that lets nothing else run

Every other module is a section of the page. Imports no torch.
"""
