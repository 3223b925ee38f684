//! Routing traces: which experts each token chose, recorded from a run and replayed without the model.
//!
//! A trace is a safetensors file; `docs/traces.md` describes it.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use horizon_core::ids::LayerId;
use horizon_core::spec::MAX_EXPERTS;
use safetensors::{Dtype, SafeTensors, View};
use serde::{Deserialize, Serialize};
use tempfile::NamedTempFile;
use thiserror::Error;

/// Key of the file's metadata; its value is [`TraceHeader`] as JSON.
pub const METADATA_KEY: &str = "horizon_trace";
/// Version of the format.
pub const VERSION: u32 = 1;
/// Longest header of a trace that is read, in bytes.
const MAX_HEADER_BYTES: u64 = 1 << 20;
/// Largest record that a trace may name, in bytes.
const MAX_RECORD_BYTES: u64 = 1 << 40;
/// Largest trace that is read: sixteen million tokens of a model with 16 layers and 8 experts a token.
pub const MAX_TRACE_BYTES: u64 = 4 << 30;

/// What a trace was recorded from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceHeader {
    /// [`VERSION`].
    pub version: u32,
    /// Which model: its name and identity, as a report gives them.
    pub model: String,
    /// E.
    pub experts: usize,
    /// k.
    pub top_k: usize,
    /// Bytes of one expert's record as the backend holds it: what a miss moves.
    pub record_bytes: u64,
    /// Layers with routed experts, ascending.
    pub layers: Vec<LayerId>,
}

/// A trace that cannot be recorded, written or read.
#[derive(Debug, Error)]
pub enum TraceError {
    /// The system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// File.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is not a trace.
    #[error("{}: not a routing trace: {problem}", path.display())]
    File {
        /// File.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// Numbers that no routing has.
    #[error("routing trace: {0}")]
    Content(String),
}

fn content<T>(problem: impl Into<String>) -> Result<T, TraceError> {
    Err(TraceError::Content(problem.into()))
}

impl TraceHeader {
    fn check(&self) -> Result<(), TraceError> {
        if self.version != VERSION {
            return content(format!(
                "version {}; this program reads version {VERSION}",
                self.version
            ));
        }
        if self.experts == 0 || self.experts > MAX_EXPERTS {
            return content(format!("{} experts; there are 1 to {MAX_EXPERTS}", self.experts));
        }
        if self.top_k == 0 || self.top_k > self.experts {
            return content(format!("{} experts a token, of {}", self.top_k, self.experts));
        }
        if self.record_bytes == 0 || self.record_bytes > MAX_RECORD_BYTES {
            return content(format!(
                "{} bytes a record; there are 1 to {MAX_RECORD_BYTES}",
                self.record_bytes
            ));
        }
        if self.layers.is_empty() || self.layers.windows(2).any(|pair| pair[0] >= pair[1]) {
            return content("the layers are not ascending, or there are none");
        }
        Ok(())
    }

    fn row(&self) -> usize {
        self.layers.len() * self.top_k
    }

    /// Checks a row: the experts of each layer in the order of the router's ranking.
    fn check_row(&self, row: &[u16]) -> Result<(), TraceError> {
        for (layer, chosen) in self.layers.iter().zip(row.chunks_exact(self.top_k)) {
            for (rank, expert) in chosen.iter().enumerate() {
                if usize::from(*expert) >= self.experts {
                    return content(format!("{layer} has no expert {expert}"));
                }
                if chosen[..rank].contains(expert) {
                    return content(format!("{layer}: expert {expert} was chosen twice for one token"));
                }
            }
        }
        Ok(())
    }
}

/// The routing of a sequence of tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    header: TraceHeader,
    /// `[tokens, layers, k]`, in the order of the router's ranking.
    experts: Vec<u16>,
    /// `[tokens]`: the step that a token's row belonged to, ascending from 0.
    step: Vec<u32>,
}

/// Records a trace, step by step.
#[derive(Clone, Debug)]
pub struct TraceWriter {
    trace: Trace,
    steps: u32,
}

impl TraceWriter {
    /// Nothing recorded yet.
    ///
    /// # Errors
    /// [`TraceError::Content`] when no model has such a header.
    pub fn new(header: TraceHeader) -> Result<Self, TraceError> {
        header.check()?;
        let trace = Trace {
            header,
            experts: Vec::new(),
            step: Vec::new(),
        };
        Ok(Self { trace, steps: 0 })
    }

    /// Records one step: for each of its rows and each layer, the chosen experts in the order of the ranking. Several
    /// rows are a prefill, or a batch.
    ///
    /// # Errors
    /// [`TraceError::Content`] when the rows do not fit the header; nothing was then recorded.
    pub fn push_step(&mut self, rows: &[Vec<Vec<u16>>]) -> Result<(), TraceError> {
        let header = &self.trace.header;
        let mut flat = Vec::with_capacity(rows.len() * header.row());
        for row in rows {
            if row.len() != header.layers.len() || row.iter().any(|c| c.len() != header.top_k) {
                return content(format!(
                    "a row must have {} layers of {} experts",
                    header.layers.len(),
                    header.top_k
                ));
            }
            let start = flat.len();
            flat.extend(row.iter().flatten());
            header.check_row(&flat[start..])?;
        }
        if rows.is_empty() {
            return content("a step has at least one row");
        }
        self.trace.experts.append(&mut flat);
        self.trace
            .step
            .extend(std::iter::repeat_n(self.steps, rows.len()));
        self.steps += 1;
        Ok(())
    }

    /// What was recorded.
    #[must_use]
    pub fn finish(self) -> Trace {
        self.trace
    }
}

impl Trace {
    /// What it was recorded from.
    #[must_use]
    pub fn header(&self) -> &TraceHeader {
        &self.header
    }

    /// Tokens.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.step.len()
    }

    /// Steps.
    #[must_use]
    pub fn steps(&self) -> usize {
        self.step.last().map_or(0, |last| *last as usize + 1)
    }

    /// Rows of each step: `[layers, k]` of each token, one after another.
    pub fn rows(&self) -> impl Iterator<Item = &[u16]> {
        let row = self.header.row();
        let mut at = 0;
        self.step.chunk_by(|a, b| a == b).map(move |tokens| {
            let start = at;
            at += tokens.len() * row;
            &self.experts[start..at]
        })
    }

    /// Adds what was recorded later, of the same model.
    ///
    /// # Errors
    /// [`TraceError::Content`] when it is of another model.
    pub fn append(&mut self, later: &Self) -> Result<(), TraceError> {
        if self.header != later.header {
            return content(format!(
                "traces of different models, {} and {}, cannot be replayed as one",
                self.header.model, later.header.model
            ));
        }
        let first = u32::try_from(self.steps()).unwrap_or(u32::MAX);
        if first
            .checked_add(u32::try_from(later.steps()).unwrap_or(u32::MAX))
            .is_none()
        {
            return content("together the traces have too many steps");
        }
        self.experts.extend_from_slice(&later.experts);
        self.step.extend(later.step.iter().map(|s| s + first));
        Ok(())
    }

    /// Writes a file; one of that name is replaced whole or not at all.
    ///
    /// # Errors
    /// [`TraceError::Io`] naming the file.
    pub fn save(&self, path: &Path) -> Result<(), TraceError> {
        let write = |mut file: NamedTempFile| {
            file.write_all(&self.to_bytes()?)?;
            file.persist(path).map_err(|e| e.error)
        };
        beside(path)
            .and_then(write)
            .map(drop)
            .map_err(|source| TraceError::Io {
                path: path.to_owned(),
                source,
            })
    }

    /// Whether a trace could be written to `path` as things are now: to be asked before a long run.
    ///
    /// # Errors
    /// [`TraceError::Io`] naming the file.
    pub fn check_destination(path: &Path) -> Result<(), TraceError> {
        beside(path).map(drop).map_err(|source| TraceError::Io {
            path: path.to_owned(),
            source,
        })
    }

    fn to_bytes(&self) -> io::Result<Vec<u8>> {
        let metadata = HashMap::from([(METADATA_KEY.to_owned(), serde_json::to_string(&self.header)?)]);
        let experts: Vec<u8> = self.experts.iter().flat_map(|e| e.to_le_bytes()).collect();
        let step: Vec<u8> = self.step.iter().flat_map(|s| s.to_le_bytes()).collect();
        let shape = vec![self.tokens(), self.header.layers.len(), self.header.top_k];
        let tensors = [
            ("experts", Bytes(Dtype::U16, shape, experts)),
            ("step", Bytes(Dtype::U32, vec![self.tokens()], step)),
        ];
        safetensors::serialize(tensors, Some(metadata)).map_err(io::Error::other)
    }

    /// Reads a file, its header first: what is no trace is refused before it is read.
    ///
    /// # Errors
    /// [`TraceError`] naming the file.
    pub fn load(path: &Path) -> Result<Self, TraceError> {
        let read = || {
            if !path.metadata()?.is_file() {
                let problem = "is not a regular file; give the path of a routing trace";
                return Err(io::Error::new(io::ErrorKind::InvalidInput, problem));
            }
            begins_like_a_trace(path)?;
            let mut bytes = Vec::new();
            File::open(path)?
                .take(MAX_TRACE_BYTES + 1)
                .read_to_end(&mut bytes)?;
            if bytes.len() as u64 > MAX_TRACE_BYTES {
                let problem = format!("larger than the {MAX_TRACE_BYTES} bytes that are accepted");
                return Err(io::Error::new(io::ErrorKind::FileTooLarge, problem));
            }
            Ok(bytes)
        };
        let bytes = read().map_err(|source| TraceError::Io {
            path: path.to_owned(),
            source,
        })?;
        Self::parse(&bytes).map_err(|problem| TraceError::File {
            path: path.to_owned(),
            problem,
        })
    }

    /// Reads the bytes of a file.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        let (_, metadata) = SafeTensors::read_metadata(bytes).map_err(|e| e.to_string())?;
        let header = metadata
            .metadata()
            .as_ref()
            .and_then(|m| m.get(METADATA_KEY))
            .ok_or_else(|| format!("its metadata has no {METADATA_KEY}"))?;
        let header: TraceHeader =
            serde_json::from_str(header).map_err(|e| format!("its {METADATA_KEY}: {e}"))?;
        header.check().map_err(|e| e.to_string())?;
        let file = SafeTensors::deserialize(bytes).map_err(|e| e.to_string())?;
        let step: Vec<u32> = values(&file, "step", Dtype::U32, None, u32::from_le_bytes)?;
        let shape = [step.len(), header.layers.len(), header.top_k];
        let experts: Vec<u16> = values(&file, "experts", Dtype::U16, Some(&shape), u16::from_le_bytes)?;
        let ascending = step
            .windows(2)
            .all(|pair| pair[1] == pair[0] || pair[1] == pair[0] + 1);
        if step.first().is_some_and(|first| *first != 0) || !ascending {
            return Err("step does not count from 0 without a gap".into());
        }
        for row in experts.chunks_exact(header.row()) {
            header.check_row(row).map_err(|e| e.to_string())?;
        }
        Ok(Self {
            header,
            experts,
            step,
        })
    }
}

/// Reads the header of a safetensors file and looks for a trace's metadata in it.
fn begins_like_a_trace(path: &Path) -> io::Result<()> {
    let other = |problem: &str| io::Error::new(io::ErrorKind::InvalidData, problem.to_owned());
    let mut file = File::open(path)?;
    let mut length = [0; 8];
    file.read_exact(&mut length)
        .map_err(|_| other("is not a routing trace: it is shorter than a header"))?;
    let length = u64::from_le_bytes(length);
    if length > MAX_HEADER_BYTES {
        return Err(other(
            "is not a routing trace: it does not begin with the length of a header",
        ));
    }
    let mut header = Vec::new();
    file.take(length).read_to_end(&mut header)?;
    if !header
        .windows(METADATA_KEY.len())
        .any(|w| w == METADATA_KEY.as_bytes())
    {
        return Err(other("is not a routing trace: its header does not say so"));
    }
    Ok(())
}

/// A file beside `path` that may take its place. It is gone when it is dropped.
fn beside(path: &Path) -> io::Result<NamedTempFile> {
    // A rename would replace a device, a pipe or a link by a file.
    if path.symlink_metadata().is_ok_and(|m| !m.is_file()) {
        let problem = "is not a regular file; give the path of a file to write";
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, problem));
    }
    if path.file_name().is_none() {
        let problem = "names no file";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, problem));
    }
    // Whatever else is there may be somebody's only copy.
    if path.metadata().is_ok_and(|m| m.len() > 0) && begins_like_a_trace(path).is_err() {
        let problem = "exists and is not a routing trace; remove it or choose another name";
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, problem));
    }
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty());
    let mut builder = tempfile::Builder::new();
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let folder = folder.unwrap_or(Path::new("."));
    // The name of the file beside it tells nobody anything.
    builder.tempfile_in(folder).map_err(|e| {
        let problem = format!("no file can be written in {}: {}", folder.display(), e.kind());
        io::Error::new(e.kind(), problem)
    })
}

/// The values of a tensor of one dimension, or of `shape`.
fn values<T, const N: usize>(
    file: &SafeTensors<'_>,
    name: &str,
    dtype: Dtype,
    shape: Option<&[usize]>,
    value: fn([u8; N]) -> T,
) -> Result<Vec<T>, String> {
    let tensor = file
        .tensor(name)
        .map_err(|_| format!("it has no tensor {name}"))?;
    let fits = match shape {
        Some(shape) => tensor.shape() == shape,
        None => tensor.shape().len() == 1,
    };
    if tensor.dtype() != dtype || !fits {
        return Err(format!(
            "tensor {name} is {} {:?}; {dtype} {} is needed",
            tensor.dtype(),
            tensor.shape(),
            shape.map_or_else(|| "of one dimension".to_owned(), |s| format!("{s:?}"))
        ));
    }
    Ok(tensor.data().as_chunks().0.iter().map(|b| value(*b)).collect())
}

/// A tensor that is to be written.
struct Bytes(Dtype, Vec<usize>, Vec<u8>);

impl View for Bytes {
    fn dtype(&self) -> Dtype {
        self.0
    }

    fn shape(&self) -> &[usize] {
        &self.1
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.2)
    }

    fn data_len(&self) -> usize {
        self.2.len()
    }
}
