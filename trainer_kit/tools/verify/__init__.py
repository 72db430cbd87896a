"""`trainer-kit verify`: checks that a killed and resumed run of a script ends with the same bits.

`verification` starts the script several times and compares their records. `child` is one of these starts: the script
with its training taken over by a `recorder`, which writes one line of marks (`fingerprints`) per step. `compare` finds
the first difference, `cause` its likely cause, and `report` formats the result.
"""
