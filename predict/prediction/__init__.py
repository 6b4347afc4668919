"""From the options of ``predict`` to predictions: points, intervals, scaling, utilisation, tables."""
