# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""mla_decode: block queries attend the paged latent cache and the block itself."""

from sparkgap.ops.mla_decode.reference import Extent, PagedRows, mla_decode

__all__ = ["Extent", "PagedRows", "mla_decode"]
