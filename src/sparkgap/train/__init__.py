# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""The recipe that trains a DSpark drafter for any causal model: data from the target's
own outputs, a distillation loss over many anchors, export to a K3DSparkModel folder."""
