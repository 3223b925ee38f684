//! Records which experts each token chose, from what the steps of a run show of themselves.

use horizon_cache::trace::{Trace, TraceError, TraceHeader, TraceWriter, VERSION};
use horizon_core::stage::{Stage, Tap, TapData};

use crate::engine::{Engine, ModelIdentity};

/// A routing trace in the making.
#[derive(Debug)]
pub struct Recorder(TraceWriter);

impl Recorder {
    /// For what `engine` will run; `None` when its model has no routed experts.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of(engine: &Engine) -> Result<Option<Self>, TraceError> {
        let (spec, settings) = (engine.spec(), engine.settings());
        let Some((moe, layout)) = spec.moe().zip(engine.layout()) else {
            return Ok(None);
        };
        let ModelIdentity {
            place, kind, sha256, ..
        } = &settings.model;
        Self::new(TraceHeader {
            version: VERSION,
            model: format!("{} ({kind}, SHA-256 {sha256})", place.display()),
            experts: moe.experts,
            top_k: moe.top_k,
            record_bytes: settings.backend.tiling().tiled_bytes(layout) as u64,
            layers: spec.moe_layers().collect(),
        })
        .map(Some)
    }

    /// Nothing recorded yet.
    ///
    /// # Errors
    /// [`TraceError::Content`] when no model has such a header.
    pub fn new(header: TraceHeader) -> Result<Self, TraceError> {
        TraceWriter::new(header).map(Self)
    }

    /// Records a step of `rows` rows by what it showed of its stages.
    ///
    /// # Errors
    /// [`TraceError::Content`] when that is not the routing of such a step; nothing was then recorded.
    pub fn push(&mut self, rows: usize, taps: &[Tap]) -> Result<(), TraceError> {
        let mut chosen: Vec<Vec<Vec<u16>>> = vec![Vec::new(); rows];
        for tap in taps {
            if let (Stage::TopkIndex(_), TapData::I32(ids)) = (tap.stage, &tap.data) {
                for (row, ids) in chosen.iter_mut().zip(ids.chunks_exact(tap.width)) {
                    // What fits no u16 is no expert of any model: the writer refuses it.
                    row.push(
                        ids.iter()
                            .map(|e| u16::try_from(*e).unwrap_or(u16::MAX))
                            .collect(),
                    );
                }
            }
        }
        self.0.push_step(&chosen)
    }

    /// What was recorded so far.
    #[must_use]
    pub fn finish(self) -> Trace {
        self.0.finish()
    }
}

#[cfg(test)]
mod tests {
    use horizon_core::ids::LayerId;

    use super::*;

    fn recorder() -> Recorder {
        let header = TraceHeader {
            version: VERSION,
            model: "test".into(),
            experts: 5,
            top_k: 2,
            record_bytes: 10,
            layers: vec![LayerId(0), LayerId(2)],
        };
        Recorder::new(header).expect("sound")
    }

    fn tap(layer: u32, ids: &[i32]) -> Tap {
        Tap {
            stage: Stage::TopkIndex(LayerId(layer)),
            width: 2,
            data: TapData::I32(ids.to_vec()),
        }
    }

    #[test]
    fn rows_and_layers_keep_their_order() {
        let mut recorder = recorder();
        let weights = Tap {
            stage: Stage::TopkWeight(LayerId(0)),
            width: 2,
            data: TapData::F32(vec![0.5; 4]),
        };
        recorder
            .push(2, &[tap(0, &[4, 1, 0, 3]), weights, tap(2, &[2, 0, 1, 2])])
            .expect("records");
        recorder
            .push(1, &[tap(0, &[3, 2]), tap(2, &[0, 4])])
            .expect("records");
        let trace = recorder.finish();
        let rows: Vec<&[u16]> = trace.rows().collect();
        assert_eq!(rows, [[4, 1, 2, 0, 0, 3, 1, 2].as_slice(), &[3, 2, 0, 4]]);
    }

    #[test]
    fn what_is_no_routing_is_refused() {
        let mut recorder = recorder();
        for taps in [
            vec![tap(0, &[1, 2])],
            vec![tap(0, &[1, 2]), tap(2, &[-1, 0])],
            vec![tap(0, &[1, 2]), tap(2, &[5, 0])],
            Vec::new(),
        ] {
            recorder.push(1, &taps).expect_err("no routing");
        }
        assert_eq!(recorder.finish().tokens(), 0);
    }
}
