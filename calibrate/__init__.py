"""Fits: alpha/beta per level and library, layer statistics, contexts -> one profile."""

from calibrate.api import diff as diff
from calibrate.api import fit as fit
from calibrate.api import merge as merge
