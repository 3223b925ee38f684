//! Which kernels a step of many rows launches, and in what form: names, grids, threads, shared memory.
//!
//! A linear product has three forms of one arithmetic (`include/product.cuh`); which of them runs changes no bit.

use crate::shape::u32_of;
use crate::tiling::{TILE_ROWS, TileEncoding};

/// A launch without its arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Form {
    /// Kernel.
    pub name: &'static str,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads a block.
    pub threads: u32,
    /// Dynamic shared memory, in bytes.
    pub shared: u32,
}

/// A shape of `Product` in `product.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Product {
    warps: usize,
    tiles: usize,
    blocks: usize,
    spans: usize,
    stages: usize,
}

impl Product {
    pub(crate) const fn new(warps: usize, tiles: usize, blocks: usize, spans: usize, stages: usize) -> Self {
        Self {
            warps,
            tiles,
            blocks,
            spans,
            stages,
        }
    }

    pub(crate) fn threads(self) -> u32 {
        u32_of(self.warps * 32)
    }

    /// Tiles of the matrix that a block takes.
    pub(crate) const fn tiles(self) -> usize {
        self.warps * self.tiles
    }

    /// Columns of eight tokens that a block takes at most.
    pub(crate) const fn columns(self) -> usize {
        self.blocks
    }

    /// Tokens that a block takes at most.
    pub(crate) const fn tokens(self) -> usize {
        self.blocks * 8
    }

    /// The ring of activations, in bytes.
    pub(crate) const fn shared(self) -> usize {
        self.stages * self.tokens() * self.spans * 128
    }
}

const WIDE: Product = Product::new(4, 2, 16, 2, 3);
const MIDDLE: Product = Product::new(4, 2, 8, 2, 3);
const NARROW: Product = Product::new(2, 1, 4, 4, 3);

/// Forms of a linear product, from many tokens to few.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinearForm {
    /// 128 rows of the matrix by 128 tokens a block.
    Wide,
    /// 128 by 64.
    Middle,
    /// 32 by 32.
    Narrow,
}

impl LinearForm {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Wide, Self::Middle, Self::Narrow];

    fn product(self) -> Product {
        match self {
            Self::Wide => WIDE,
            Self::Middle => MIDDLE,
            Self::Narrow => NARROW,
        }
    }

    /// The form for a matrix of `tiles` tiles and so many tokens: the largest blocks that still fill the card.
    #[must_use]
    pub fn choose(tiles: usize, tokens: usize, multiprocessors: usize) -> Self {
        let blocks = |p: Product| tiles.div_ceil(p.tiles()) * tokens.div_ceil(p.tokens());
        if tokens > 64 && blocks(WIDE) >= multiprocessors {
            Self::Wide
        } else if tokens > 32 && 2 * blocks(MIDDLE) >= multiprocessors {
            Self::Middle
        } else {
            Self::Narrow
        }
    }

    /// `layers/prefill_linear.cu` for `outputs` outputs a token, of a plain matrix or of pair tiles.
    ///
    /// # Panics
    /// When non-routed matrices are said to be INT4, which they never are.
    #[must_use]
    pub fn launch(self, encoding: TileEncoding, pairs: bool, outputs: usize, tokens: usize) -> Form {
        let name = match (encoding, pairs, self) {
            (TileEncoding::F16, false, Self::Wide) => "prefill_linear_f16_wide",
            (TileEncoding::F16, false, Self::Middle) => "prefill_linear_f16_middle",
            (TileEncoding::F16, false, Self::Narrow) => "prefill_linear_f16_narrow",
            (TileEncoding::Q8, false, Self::Wide) => "prefill_linear_q8_wide",
            (TileEncoding::Q8, false, Self::Middle) => "prefill_linear_q8_middle",
            (TileEncoding::Q8, false, Self::Narrow) => "prefill_linear_q8_narrow",
            (TileEncoding::F16, true, Self::Wide) => "prefill_pairs_f16_wide",
            (TileEncoding::F16, true, Self::Middle) => "prefill_pairs_f16_middle",
            (TileEncoding::F16, true, Self::Narrow) => "prefill_pairs_f16_narrow",
            (TileEncoding::Q8, true, Self::Wide) => "prefill_pairs_q8_wide",
            (TileEncoding::Q8, true, Self::Middle) => "prefill_pairs_q8_middle",
            (TileEncoding::Q8, true, Self::Narrow) => "prefill_pairs_q8_narrow",
            (TileEncoding::Int4 { .. }, ..) => unreachable!("non-routed matrices are f16 or q8"),
        };
        let product = self.product();
        let blocks = matrix_tiles(outputs, pairs).div_ceil(product.tiles());
        Form {
            name,
            grid: [u32_of(blocks), u32_of(tokens.div_ceil(product.tokens())), 1],
            threads: product.threads(),
            shared: u32_of(product.shared()),
        }
    }
}

/// Tiles of a matrix with that many outputs.
#[must_use]
pub fn matrix_tiles(outputs: usize, pairs: bool) -> usize {
    if pairs {
        outputs / 8
    } else {
        outputs.div_ceil(TILE_ROWS)
    }
}

/// The product of a non-routed matrix, in the form that suits the sizes.
#[must_use]
pub fn linear(
    encoding: TileEncoding,
    pairs: bool,
    outputs: usize,
    tokens: usize,
    multiprocessors: usize,
) -> Form {
    LinearForm::choose(matrix_tiles(outputs, pairs), tokens, multiprocessors)
        .launch(encoding, pairs, outputs, tokens)
}

/// `prefill_norm`: a warp a row.
#[must_use]
pub fn norm(rows: usize) -> Form {
    Form {
        name: "prefill_norm",
        grid: [u32_of(rows.div_ceil(4)), 1, 1],
        threads: 128,
        shared: 0,
    }
}

/// `prefill_qkv`: a block a row.
#[must_use]
pub fn qkv(rows: usize) -> Form {
    Form {
        name: "prefill_qkv",
        grid: [u32_of(rows), 1, 1],
        threads: 256,
        shared: 8 * 4,
    }
}

/// Rows of a block of attention.
const ATTENTION_ROWS: usize = 64;

/// `layers/prefill_attention.cu`: 64 rows and a head a block.
///
/// # Panics
/// When heads are wider than 256, which the plan refuses.
#[must_use]
pub fn attention(rows: usize, heads: usize, padded: usize) -> Form {
    assert!(padded <= 256, "heads of {padded}");
    let (name, width, keys) = match padded {
        0..=32 => ("prefill_attention_32", 32, 64),
        33..=64 => ("prefill_attention_64", 64, 64),
        65..=128 => ("prefill_attention_128", 128, 64),
        _ => ("prefill_attention_256", 256, 16),
    };
    Form {
        name,
        grid: [u32_of(rows.div_ceil(ATTENTION_ROWS)), u32_of(heads), 1],
        threads: 128,
        shared: u32_of((ATTENTION_ROWS + 4 * keys) * width * 2 + ATTENTION_ROWS * 8),
    }
}

/// `prefill_router`: four rows a block.
#[must_use]
pub fn router(rows: usize, experts: usize, gates: usize) -> Form {
    let (block_rows, warps, piece) = (4, 16, 512);
    let floats = piece * block_rows + block_rows + warps * 64 * block_rows + block_rows * (experts + gates);
    Form {
        name: "prefill_router",
        grid: [u32_of(rows.div_ceil(block_rows)), 1, 1],
        threads: u32_of(warps * 32),
        shared: u32_of(floats * 4),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_products_take_large_blocks_and_few_tokens_small_ones() {
        // OLMoE on 132 multiprocessors: queries, keys and values; the output projection; a short prompt.
        assert_eq!(LinearForm::choose(384, 512, 132), LinearForm::Wide);
        assert_eq!(LinearForm::choose(128, 512, 132), LinearForm::Middle);
        assert_eq!(LinearForm::choose(128, 32, 132), LinearForm::Narrow);
        let form = linear(TileEncoding::F16, false, 2048, 512, 132);
        assert_eq!((form.name, form.grid), ("prefill_linear_f16_middle", [16, 8, 1]));
        // A last block of rows, and of tokens, that is not full.
        let form = linear(TileEncoding::Q8, true, 1048, 33, 1);
        assert_eq!((form.name, form.grid), ("prefill_pairs_q8_middle", [17, 1, 1]));
    }

    #[test]
    fn shared_memory_fits_every_supported_card() {
        // 99 KiB a block on compute capability 8.6, 8.9 and 12.0.
        let most = 99 << 10;
        for form in LinearForm::ALL {
            assert!(form.launch(TileEncoding::F16, false, 64, 64).shared <= most);
        }
        for padded in [8, 32, 64, 80, 128, 256] {
            assert!(attention(512, 16, padded).shared <= most, "heads of {padded}");
        }
        assert!(router(512, 1024, 1).shared <= most);
    }
}
