"""`trainer-kit verify`: does a run of this script that is killed and resumed end with the same bits?

`verification` starts the script several times and compares what these starts wrote. `start` is one of them: the script
with its training taken over, watched by a `recorder`, which writes `marks` of everything, a line a step. `compare`
finds the first difference, `cause` what it likely comes from, and `report` says it.
"""
