"""What the tests of this folder share."""

from browser import browser as browser
from explored_page import served as served
