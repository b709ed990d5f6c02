# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""The one place that states the version; the newest CHANGELOG heading must equal it."""

__version__ = "0.1.0"
