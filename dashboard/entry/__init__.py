"""The script that Streamlit runs, in a folder of its own.

Streamlit takes a folder `pages` beside the script it runs for scripts to run by themselves: a cold deep link
to /techniques would then run `pages/techniques.py`, which draws nothing. It also puts the script's folder on
`sys.path`, where `jobs` and `theme` would be top-level modules.
"""
