//! What counts as equal. A result is an error that must be looked at; NaN never passes.

use std::collections::BTreeSet;
use std::fmt;

use crate::backend::StepOutput;
use crate::stage::{Stage, Tap, TapData};

/// How far a backend may be from the reference.
///
/// A backend sums in another order, so a value next to a rounding boundary of FP16 may be rounded the other way. What
/// that does downstream is a part of what FP16 itself does: the distance between the reference with FP32 and with FP16
/// activations, at the same stage and row, is the yardstick. Fewer values flip than are rounded, so a backend that
/// computes the same function stays below it; a mistake does not. One row's distance is one draw: three of them are allowed.
#[derive(Clone, Copy, Debug)]
pub struct Tolerance {
    /// Times the distance that FP16 makes at the stage.
    pub factor: f32,
    /// Bound on ‖difference‖ / ‖reference‖ where FP16 makes none: sums of FP32 in another order.
    pub floor: f32,
    /// Router logits nearer than this, in root sums of squares of the row, may rank either way.
    pub tie: f32,
}

impl Tolerance {
    /// The same bits.
    pub const BITS: Self = Self {
        factor: 0.0,
        floor: 0.0,
        tie: 0.0,
    };
    /// FP16 inputs of products, FP32 sums in another order.
    pub const FP16: Self = Self {
        factor: 3.0,
        floor: 2e-6,
        tie: 1e-3,
    };
}

/// The first place where two outputs part.
#[derive(Clone, Debug, PartialEq)]
pub struct Disagreement {
    /// Which stage; `None`: the logits.
    pub stage: Option<Stage>,
    /// Row of the step.
    pub row: usize,
    /// What is wrong.
    pub what: String,
}

impl fmt::Display for Disagreement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.stage {
            Some(stage) => write!(f, "first at {stage}, row {}: {}", self.row, self.what),
            None => write!(f, "first at the logits, row {}: {}", self.row, self.what),
        }
    }
}

fn find(taps: &[Tap], stage: Stage) -> Option<&Tap> {
    taps.iter().find(|t| t.stage == stage)
}

impl Tolerance {
    /// Compares with `want`, the reference under FP16 activations; `exact` is the reference under FP32 activations.
    /// All taps in the order of the stages, then the logits. Rows whose routing parted at a near tie are left
    /// out from there on.
    ///
    /// # Errors
    /// The first [`Disagreement`].
    pub fn outputs(
        &self,
        want: &StepOutput,
        exact: &StepOutput,
        got: &StepOutput,
        rows: usize,
    ) -> Result<(), Disagreement> {
        let mut parted = BTreeSet::new();
        let mut taps: Vec<&Tap> = want.taps.iter().collect();
        taps.sort_by_key(|t| order(t.stage));
        for want_tap in taps {
            let stage = want_tap.stage;
            let missing = || Disagreement {
                stage: Some(stage),
                row: 0,
                what: "the stage is missing, or of another size".into(),
            };
            let got_tap = find(&got.taps, stage)
                .filter(|t| t.width == want_tap.width)
                .ok_or_else(missing)?;
            match (&want_tap.data, &got_tap.data) {
                (TapData::F32(w), TapData::F32(g)) if w.len() == g.len() => {
                    if matches!(stage, Stage::TopkWeight(_)) {
                        continue;
                    }
                    let Some(Tap {
                        data: TapData::F32(exact),
                        ..
                    }) = find(&exact.taps, stage)
                    else {
                        return Err(missing());
                    };
                    self.rows(Some(stage), [w, exact, g], want_tap.width, &parted)?;
                }
                (TapData::I32(w), TapData::I32(g)) if w.len() == g.len() => {
                    let Stage::TopkIndex(layer) = stage else { continue };
                    let logits = find(&want.taps, Stage::RouterLogits(layer)).ok_or_else(missing)?;
                    self.routing(stage, (w, g), want_tap.width, logits, &mut parted)?;
                }
                _ => return Err(missing()),
            }
        }
        let vocab = want.logits.len() / rows.max(1);
        if want.logits.len() != got.logits.len() {
            return Err(Disagreement {
                stage: None,
                row: 0,
                what: format!("{} logits instead of {}", got.logits.len(), want.logits.len()),
            });
        }
        self.rows(None, [&want.logits, &exact.logits, &got.logits], vocab, &parted)
    }

    fn rows(
        &self,
        stage: Option<Stage>,
        [want, exact, got]: [&[f32]; 3],
        width: usize,
        parted: &BTreeSet<usize>,
    ) -> Result<(), Disagreement> {
        #[expect(clippy::cast_precision_loss, reason = "widths are small")]
        let count = width as f32;
        // The length of a short row is a draw that scatters more.
        let few = 1.0 + 3.0 / count.sqrt();
        let distance = |a: &[f32], b: &[f32]| {
            a.iter()
                .zip(b)
                .map(|(a, b)| (a - b) * (a - b))
                .sum::<f32>()
                .sqrt()
        };
        let rows = want
            .chunks_exact(width)
            .zip(exact.chunks_exact(width))
            .zip(got.chunks_exact(width));
        for (row, ((w, exact), g)) in rows.enumerate() {
            if parted.contains(&row) {
                continue;
            }
            let fail = |what| Err(Disagreement { stage, row, what });
            if let Some(i) = g.iter().position(|v| !v.is_finite()) {
                return fail(format!("element {i} is {}", g[i]));
            }
            let norm = w.iter().map(|v| v * v).sum::<f32>().sqrt();
            let (difference, allowed) = (
                distance(w, g),
                self.factor * few * distance(w, exact) + self.floor * norm,
            );
            if difference > allowed {
                return fail(format!(
                    "relative error {:e} above {:e}",
                    difference / norm,
                    allowed / norm
                ));
            }
            let bound = 8.0 * allowed / count.sqrt();
            for (i, (w, g)) in w.iter().zip(g).enumerate() {
                if (w - g).abs() > bound {
                    return fail(format!("element {i} is {g}, not {w} ± {bound}"));
                }
            }
        }
        Ok(())
    }

    fn routing(
        &self,
        stage: Stage,
        (want, got): (&[i32], &[i32]),
        top_k: usize,
        logits: &Tap,
        parted: &mut BTreeSet<usize>,
    ) -> Result<(), Disagreement> {
        let TapData::F32(logits_all) = &logits.data else {
            return Err(Disagreement {
                stage: Some(stage),
                row: 0,
                what: "router logits are no numbers".into(),
            });
        };
        for (row, (w, g)) in want.chunks_exact(top_k).zip(got.chunks_exact(top_k)).enumerate() {
            if w == g || parted.contains(&row) {
                continue;
            }
            let logits = &logits_all[row * logits.width..(row + 1) * logits.width];
            let scale = logits.iter().map(|v| v * v).sum::<f32>().sqrt();
            // Every rank that parts must be between experts that are almost equally likely.
            for (w, g) in w.iter().zip(g) {
                let at = |e: i32| usize::try_from(e).ok().and_then(|e| logits.get(e)).copied();
                let near = at(*w)
                    .zip(at(*g))
                    .is_some_and(|(a, b)| (a - b).abs() <= self.tie * scale);
                if !near {
                    return Err(Disagreement {
                        stage: Some(stage),
                        row,
                        what: format!("expert {g} instead of {w}, which is no near tie"),
                    });
                }
            }
            parted.insert(row);
        }
        Ok(())
    }
}

/// Layers in order, and within a layer the stages in the order of the forward pass.
fn order(stage: Stage) -> (usize, u8) {
    match stage {
        Stage::AttentionOutput(l) => (l.index(), 0),
        Stage::RouterLogits(l) => (l.index(), 1),
        Stage::TopkIndex(l) => (l.index(), 2),
        Stage::TopkWeight(l) => (l.index(), 3),
        Stage::FeedForwardOutput(l) => (l.index(), 4),
        Stage::Hidden(l) => (l.index(), 5),
    }
}
