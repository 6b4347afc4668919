"""What the tests of this folder share."""

from browser import browser as browser
