//! Launches of executor `grouped-t3`: index, gate + up, down + combine (`grouped_t3.cu`).

use crate::prefill::{Form, Product};
use crate::shape::u32_of;
use crate::tiling::{TILE_ROWS, TileEncoding};

/// In a slot table: the expert takes no part in this launch. A group that is larger than the cache runs as several
/// pairs of launches (gate + up, then down) after one index, each expert in exactly one of them; the sum over ranks
/// follows by itself in the last.
pub const ABSENT: u32 = u32::MAX;
/// Bytes of a work tile.
pub const WORK_BYTES: usize = 16;

const WIDE: Product = Product::new(4, 2, 8, 2, 3);
const MIDDLE: Product = Product::new(4, 2, 2, 4, 4);
const SINGLE: Product = Product::new(8, 1, 1, 8, 3);

/// Forms of one arithmetic, by how many tokens share an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupedForm {
    /// Many: 128 rows of a matrix by 64 tokens a block.
    Wide,
    /// A few: 128 by 16.
    Middle,
    /// Steps of at most eight rows: 128 by 8.
    Single,
}

/// What `grouped-t3` is launched for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Groups {
    /// Rows of the step.
    pub rows: usize,
    /// Experts a row.
    pub top_k: usize,
    /// Experts of the layer.
    pub experts: usize,
    /// Residual stream.
    pub hidden: usize,
    /// Rows of gate and of up.
    pub width: usize,
    /// Form of the records: INT4 or FP16.
    pub encoding: TileEncoding,
}

impl GroupedForm {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Wide, Self::Middle, Self::Single];

    fn product(self) -> Product {
        match self {
            Self::Wide => WIDE,
            Self::Middle => MIDDLE,
            Self::Single => SINGLE,
        }
    }

    /// Columns of eight pairs that a work tile may have: `most` of the index.
    #[must_use]
    pub fn most(self) -> u32 {
        u32_of(self.product().columns())
    }
}

impl Groups {
    /// The form that suits them. It changes no bit.
    #[must_use]
    pub fn form(&self) -> GroupedForm {
        let pairs = self.pairs();
        if self.rows <= 8 {
            GroupedForm::Single
        } else if pairs <= 16 * self.experts.min(pairs) {
            GroupedForm::Middle
        } else {
            GroupedForm::Wide
        }
    }

    fn pairs(&self) -> usize {
        self.rows * self.top_k
    }

    /// Most work tiles that the index can make, for `form`.
    #[must_use]
    pub fn work_tiles(&self, form: GroupedForm) -> usize {
        let (pairs, tokens) = (self.pairs(), form.product().tokens());
        let active = self.experts.min(pairs);
        active + (pairs - active) / tokens
    }

    /// Words of counters that steps of at most these rows need, zero before the first of them.
    #[must_use]
    pub fn counters(&self) -> usize {
        let fewest = GroupedForm::ALL
            .map(|f| f.product().tiles())
            .into_iter()
            .min()
            .unwrap_or(1);
        self.rows * self.hidden.div_ceil(TILE_ROWS).div_ceil(fewest)
    }

    /// The index: one block.
    #[must_use]
    pub fn index(&self) -> Form {
        let threads = self
            .experts
            .max(self.pairs() / 4)
            .next_multiple_of(32)
            .clamp(64, 1024);
        Form {
            name: "grouped_t3_index",
            grid: [1, 1, 1],
            threads: u32_of(threads),
            shared: u32_of((2 * self.experts + 33 + 9) * 4),
        }
    }

    /// Gate, up and the product of both.
    #[must_use]
    pub fn gate_up(&self, form: GroupedForm) -> Form {
        let name = match (self.packed(), form) {
            (true, GroupedForm::Wide) => "grouped_t3_gate_up_int4_wide",
            (true, GroupedForm::Middle) => "grouped_t3_gate_up_int4_middle",
            (true, GroupedForm::Single) => "grouped_t3_gate_up_int4_single",
            (false, GroupedForm::Wide) => "grouped_t3_gate_up_f16_wide",
            (false, GroupedForm::Middle) => "grouped_t3_gate_up_f16_middle",
            (false, GroupedForm::Single) => "grouped_t3_gate_up_f16_single",
        };
        self.over(form, name, self.width / 8)
    }

    /// Down, and the sum over ranks.
    #[must_use]
    pub fn down(&self, form: GroupedForm) -> Form {
        let name = match (self.packed(), form) {
            (true, GroupedForm::Wide) => "grouped_t3_down_int4_wide",
            (true, GroupedForm::Middle) => "grouped_t3_down_int4_middle",
            (true, GroupedForm::Single) => "grouped_t3_down_int4_single",
            (false, GroupedForm::Wide) => "grouped_t3_down_f16_wide",
            (false, GroupedForm::Middle) => "grouped_t3_down_f16_middle",
            (false, GroupedForm::Single) => "grouped_t3_down_f16_single",
        };
        self.over(form, name, self.hidden.div_ceil(TILE_ROWS))
    }

    fn packed(&self) -> bool {
        matches!(self.encoding, TileEncoding::Int4 { .. })
    }

    fn over(&self, form: GroupedForm, name: &'static str, tiles: usize) -> Form {
        let product = form.product();
        Form {
            name,
            grid: [
                u32_of(tiles.div_ceil(product.tiles())),
                u32_of(self.work_tiles(form)),
                1,
            ],
            threads: product.threads(),
            // The ring, a word a token, one more.
            shared: u32_of(product.shared() + (product.tokens() + 1) * 4),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn olmoe(rows: usize) -> Groups {
        Groups {
            rows,
            top_k: 8,
            experts: 64,
            hidden: 2048,
            width: 1024,
            encoding: TileEncoding::Int4 { block: 256 },
        }
    }

    #[test]
    fn forms_follow_the_tokens_an_expert() {
        assert_eq!(olmoe(1).form(), GroupedForm::Single);
        assert_eq!(olmoe(64).form(), GroupedForm::Middle);
        assert_eq!(olmoe(512).form(), GroupedForm::Wide);
        assert_eq!(olmoe(512).gate_up(GroupedForm::Wide).grid, [16, 127, 1]);
        assert_eq!(olmoe(1).down(GroupedForm::Single).grid, [16, 8, 1]);
    }

    #[test]
    fn the_bound_of_work_tiles_is_reached_and_never_exceeded() {
        for (rows, top_k, experts) in [(1, 8, 64), (130, 3, 4), (512, 1, 1), (77, 5, 60)] {
            let groups = Groups {
                rows,
                top_k,
                experts,
                ..olmoe(1)
            };
            for form in GroupedForm::ALL {
                let tokens = form.product().tokens();
                // The worst case: all experts but one with one pair, or as even as possible.
                let pairs = rows * top_k;
                let active = experts.min(pairs);
                let uneven = active - 1 + (pairs - active + 1).div_ceil(tokens);
                let even: usize = (0..active).map(|e| ((pairs + e) / active).div_ceil(tokens)).sum();
                assert!(uneven.max(even) <= groups.work_tiles(form));
                assert_eq!(uneven, groups.work_tiles(form));
            }
        }
    }

    #[test]
    fn shared_memory_fits_every_supported_card() {
        for form in GroupedForm::ALL {
            assert!(olmoe(512).gate_up(form).shared <= 99 << 10);
        }
        assert!(
            Groups {
                experts: 4096,
                ..olmoe(512)
            }
            .index()
            .shared
                <= 48 << 10
        );
    }
}
