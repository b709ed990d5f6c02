# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Data only: one folder per drafter, each a K3DSparkModel checkpoint with its card.

`sparkgap.cli.loading` is the reader; it finds the folder through the import system."""
