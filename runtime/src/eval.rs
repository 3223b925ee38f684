//! Measurements of a model's output: logits at every position, and perplexity.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use horizon_core::backend::{CompiledModel, StepBatch, StepError, StepOutput, StepRow};
use horizon_core::provider::ExpertProvider;
use horizon_core::stage::{Stage, TapData};
use safetensors::tensor::{Dtype, TensorView};
use serde::Serialize;
use thiserror::Error;

/// Logits of a sequence, and what its stages produced.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SequenceOutput {
    /// Positions.
    pub positions: usize,
    /// `[positions, vocab]`.
    pub logits: Vec<f32>,
    /// Values a position, and `[positions, width]` values, by stage; empty if not asked for.
    pub taps: BTreeMap<Stage, (usize, TapData)>,
}

/// An evaluation that failed.
#[derive(Debug, Error)]
pub enum EvalError {
    /// A step.
    #[error(transparent)]
    Step(#[from] StepError),
    /// Nothing to evaluate.
    #[error("{0}")]
    Nothing(String),
    /// The model's output.
    #[error("the logits at position {position} contain {value}; the model's output cannot be trusted")]
    NotFinite {
        /// Position in its window.
        position: usize,
        /// NaN or infinity.
        value: f32,
    },
    /// The file.
    #[error("cannot write {path}: {source}")]
    Write {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// A model and its experts, without a conversation.
pub struct Evaluator<'a> {
    /// The model.
    pub model: &'a mut dyn CompiledModel,
    /// Its experts.
    pub experts: &'a Arc<dyn ExpertProvider>,
    /// Rows of a step.
    pub chunk: usize,
}

impl Evaluator<'_> {
    /// Runs `tokens` from position 0 and gives the logits at every position.
    ///
    /// # Errors
    /// [`EvalError::Nothing`] without tokens; what the backend refuses.
    pub fn sequence(&mut self, tokens: &[u32], taps: bool) -> Result<SequenceOutput, EvalError> {
        if tokens.is_empty() {
            return Err(EvalError::Nothing("there are no tokens to evaluate".into()));
        }
        let mut out = SequenceOutput {
            positions: tokens.len(),
            ..SequenceOutput::default()
        };
        self.steps(tokens, taps, |_, step| {
            out.logits.extend_from_slice(&step.logits);
            for tap in step.taps {
                match out.taps.entry(tap.stage) {
                    std::collections::btree_map::Entry::Vacant(v) => {
                        v.insert((tap.width, tap.data));
                    }
                    std::collections::btree_map::Entry::Occupied(mut o) => {
                        extend(&mut o.get_mut().1, tap.data);
                    }
                }
            }
            Ok(())
        })?;
        Ok(out)
    }

    /// Runs `tokens` in chunks, logits of every row; `each` gets the position of the chunk's first row.
    fn steps(
        &mut self,
        tokens: &[u32],
        taps: bool,
        mut each: impl FnMut(usize, StepOutput) -> Result<(), EvalError>,
    ) -> Result<(), EvalError> {
        for (i, chunk) in tokens.chunks(self.chunk).enumerate() {
            let start = i * self.chunk;
            let row = |(j, token): (usize, &u32)| StepRow {
                token: *token,
                position: start + j,
                sequence: 0,
                logits: true,
            };
            let batch = StepBatch {
                rows: chunk.iter().enumerate().map(row).collect(),
                taps,
                ..StepBatch::default()
            };
            let ticket = self.model.enqueue(&batch, self.experts)?;
            each(start, self.model.finish(ticket)?)?;
        }
        Ok(())
    }

    /// Mean negative log likelihood by this protocol: the tokens are cut into consecutive windows of `window`;
    /// every window runs on its own from position 0, and every token but the first of each window is predicted.
    /// A last window of one token predicts nothing. Sums are FP64. `progress` gets the tokens done.
    ///
    /// # Errors
    /// [`EvalError::Nothing`] when no token would be predicted; what the backend refuses; output that is not
    /// finite.
    pub fn perplexity(
        &mut self,
        tokens: &[u32],
        window: usize,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Perplexity, EvalError> {
        if window < 2 {
            return Err(EvalError::Nothing(format!(
                "a window of {window} predicts nothing; it must be at least 2"
            )));
        }
        let (mut sum, mut predicted, mut windows) = (0.0, 0, 0);
        for (w, ids) in tokens.chunks(window).enumerate().filter(|(_, ids)| ids.len() > 1) {
            windows += 1;
            self.steps(ids, false, |start, step| {
                let rows = step.tokens.len();
                let vocab = step.logits.len() / rows;
                for (position, logits) in (start..).zip(step.logits.chunks_exact(vocab)) {
                    if let Some(next) = ids.get(position + 1) {
                        sum += negative_log_likelihood(logits, *next, position)?;
                        predicted += 1;
                    }
                }
                progress(w * window + start + rows);
                Ok(())
            })?;
        }
        if predicted == 0 {
            let n = tokens.len();
            return Err(EvalError::Nothing(format!(
                "the text has {n} tokens; predicting one needs two"
            )));
        }
        let nll = sum / predicted as f64;
        Ok(Perplexity {
            nll,
            perplexity: libm::exp(nll),
            tokens: tokens.len(),
            predicted,
            window,
            windows,
        })
    }
}

/// How well a model predicts a text.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Perplexity {
    /// Mean negative log likelihood, nats a predicted token.
    pub nll: f64,
    /// `exp(nll)`.
    pub perplexity: f64,
    /// Tokens of the text.
    pub tokens: usize,
    /// Tokens predicted.
    pub predicted: usize,
    /// Tokens of a window.
    pub window: usize,
    /// Windows run.
    pub windows: usize,
}

/// −ln softmax(logits)[next], in FP64 with an `exp` and `ln` that are the same everywhere.
fn negative_log_likelihood(logits: &[f32], next: u32, position: usize) -> Result<f64, EvalError> {
    if let Some(value) = logits.iter().copied().find(|v| v.is_nan() || *v == f32::INFINITY) {
        return Err(EvalError::NotFinite { position, value });
    }
    let largest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|l| libm::exp(f64::from(*l) - largest)).sum();
    Ok(libm::log(sum) + largest - f64::from(logits[next as usize]))
}

fn extend(all: &mut TapData, more: TapData) {
    match (all, more) {
        (TapData::F32(a), TapData::F32(b)) => a.extend(b),
        (TapData::I32(a), TapData::I32(b)) => a.extend(b),
        _ => unreachable!("a stage always produces one type"),
    }
}

impl SequenceOutput {
    /// Writes `logits` (F32 `[positions, vocab]`) and the taps under their stage names to a safetensors file,
    /// beside and then renamed.
    ///
    /// # Errors
    /// [`EvalError::Write`].
    pub fn write_safetensors(&self, path: &Path) -> Result<(), EvalError> {
        let failed = |source| EvalError::Write {
            path: path.to_path_buf(),
            source,
        };
        let mut views = Vec::new();
        let vocab = self.logits.len() / self.positions;
        views.push((
            "logits".to_string(),
            self.view(Dtype::F32, vocab, bytemuck::cast_slice(&self.logits)),
        ));
        for (stage, (width, data)) in &self.taps {
            let (dtype, bytes) = match data {
                TapData::F32(v) => (Dtype::F32, bytemuck::cast_slice(v)),
                TapData::I32(v) => (Dtype::I32, bytemuck::cast_slice(v)),
            };
            views.push((stage.to_string(), self.view(dtype, *width, bytes)));
        }
        // A rename would replace a device, a pipe or a link by a file.
        if path.symlink_metadata().is_ok_and(|m| !m.is_file()) {
            return Err(failed(io::Error::new(
                io::ErrorKind::AlreadyExists,
                "is not a regular file; give the path of a file to write",
            )));
        }
        let bytes = safetensors::serialize(views, None).map_err(|e| failed(io::Error::other(e)))?;
        let folder = path
            .parent()
            .filter(|p| !p.as_os_str().is_empty())
            .unwrap_or(Path::new("."));
        let mut builder = tempfile::Builder::new();
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
        let mut file = builder.tempfile_in(folder).map_err(failed)?;
        file.write_all(&bytes).map_err(failed)?;
        file.persist(path).map_err(|e| failed(e.error))?;
        Ok(())
    }

    fn view<'a>(&self, dtype: Dtype, width: usize, bytes: &'a [u8]) -> TensorView<'a> {
        TensorView::new(dtype, vec![self.positions, width], bytes).expect("rows and width give the size")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scripted::{NoProvider, ScriptedModel};

    fn with_model<T>(vocab: u32, run: impl FnOnce(&mut Evaluator<'_>) -> T) -> T {
        let (mut model, _) = ScriptedModel::new(vocab, 16, &[]);
        let experts: Arc<dyn ExpertProvider> = Arc::new(NoProvider);
        run(&mut Evaluator {
            model: &mut model,
            experts: &experts,
            chunk: 3,
        })
    }

    #[cfg(unix)]
    #[test]
    fn output_replaces_files_and_nothing_else() {
        let dir = tempfile::tempdir().expect("a directory");
        let (file, link) = (dir.path().join("out"), dir.path().join("link"));
        let output = SequenceOutput {
            positions: 1,
            logits: vec![1.0, 2.0],
            taps: BTreeMap::new(),
        };
        std::fs::write(&file, "old").expect("writes");
        std::os::unix::fs::symlink(&file, &link).expect("links");
        output.write_safetensors(&link).expect_err("a link stays a link");
        assert_eq!(std::fs::read(&file).expect("reads"), b"old");
        output.write_safetensors(&file).expect("a file is replaced");
        assert!(std::fs::read(&file).expect("reads").len() > 8);
    }

    #[test]
    fn chunks_make_one_sequence() {
        let tokens = [5, 1, 4, 2, 3, 0, 1];
        let out = with_model(8, |e| e.sequence(&tokens, false)).expect("runs");
        assert_eq!((out.positions, out.logits.len()), (7, 56));
        let first = with_model(8, |e| e.sequence(&tokens[..2], false)).expect("runs");
        assert_eq!(out.logits[..16], first.logits);
        assert!(with_model(8, |e| e.sequence(&[], false)).is_err());
    }

    #[test]
    fn perplexity_follows_the_protocol() {
        // The scripted model gives one token logit 2 and the others 0: a hit costs ln(e² + 7) − 2, a miss
        // ln(e² + 7), and which of the two it is follows from a run of the window on its own.
        let tokens: Vec<u32> = (0..21).map(|i| (i * 5 + i / 3) % 8).collect();
        let mut want = 0.0;
        for ids in [&tokens[..10], &tokens[10..20]] {
            let out = with_model(8, |e| e.sequence(ids, false)).expect("runs");
            for (i, next) in ids.iter().skip(1).enumerate() {
                want += (2f64.exp() + 7.0).ln() - f64::from(out.logits[i * 8 + *next as usize]);
            }
        }
        let mut seen = Vec::new();
        let got = with_model(8, |e| e.perplexity(&tokens, 10, &mut |n| seen.push(n))).expect("runs");
        assert_eq!((got.tokens, got.predicted, got.windows), (21, 18, 2));
        assert!((got.nll - want / 18.0).abs() < 1e-12, "{got:?}, {want}");
        assert_eq!(seen, [3, 6, 9, 10, 13, 16, 19, 20]);
        assert!(with_model(8, |e| e.perplexity(&tokens[..1], 10, &mut |_| {})).is_err());
        assert!(with_model(8, |e| e.perplexity(&tokens, 1, &mut |_| {})).is_err());
    }

    #[test]
    fn the_likelihood_of_large_logits_is_exact_and_nan_is_refused() {
        let n = |l: &[f32], t| negative_log_likelihood(l, t, 0).expect("finite");
        assert!((n(&[1000.0, 1000.0], 1) - 2f64.ln()).abs() < 1e-12);
        assert!((n(&[0.0, 3f32.ln()], 0) - 4f64.ln()).abs() < 1e-7);
        assert!(n(&[0.0, f32::NEG_INFINITY], 1).is_infinite());
        assert!(negative_log_likelihood(&[0.0, f32::NAN], 0, 3).is_err());
    }

    #[test]
    fn the_file_holds_logits_and_taps_by_stage_name() {
        use horizon_core::ids::LayerId;
        let taps = BTreeMap::from([
            (
                Stage::Hidden(LayerId(1)),
                (2, TapData::F32(vec![1.0, 2.0, 3.0, 4.0])),
            ),
            (Stage::TopkIndex(LayerId(0)), (1, TapData::I32(vec![7, -1]))),
        ]);
        let out = SequenceOutput {
            positions: 2,
            logits: vec![0.5; 6],
            taps,
        };
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("out.safetensors");
        out.write_safetensors(&path).expect("writes");
        let bytes = std::fs::read(&path).expect("was written");
        let read = safetensors::SafeTensors::deserialize(&bytes).expect("is safetensors");
        let tensor = |name| {
            let t = read.tensor(name).expect(name);
            (t.dtype(), t.shape().to_vec(), t.data().to_vec())
        };
        assert_eq!(
            tensor("logits"),
            (
                Dtype::F32,
                vec![2, 3],
                bytemuck::cast_slice(&[0.5f32; 6]).to_vec()
            )
        );
        assert_eq!(tensor("hidden.1").1, [2, 2]);
        assert_eq!(
            tensor("topk_index.0"),
            (Dtype::I32, vec![2, 1], bytemuck::cast_slice(&[7i32, -1]).to_vec())
        );
        let missing = out
            .write_safetensors(&folder.path().join("no/out.safetensors"))
            .expect_err("no folder");
        assert!(missing.to_string().contains("no/out.safetensors"));
    }
}
