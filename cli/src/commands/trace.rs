//! `--trace`: the record of a run's routing.

use std::path::{Path, PathBuf};

use horizon_cache::trace::Trace;
use horizon_core::spec::ModelSpec;
use horizon_runtime::engine::Engine;
use horizon_runtime::recorder::Recorder;
use horizon_runtime::session::Session;
use serde::Serialize;

use crate::output::CliError;

/// What reports say of a trace.
#[derive(Clone, Debug, Serialize)]
pub struct TraceReport {
    /// File.
    pub path: PathBuf,
    /// Tokens whose routing it has.
    pub tokens: usize,
    /// Steps.
    pub steps: usize,
}

impl TraceReport {
    /// The line about it.
    pub fn line(&self) -> String {
        let (path, tokens, steps) = (self.path.display(), self.tokens, self.steps);
        format!("routing of {tokens} tokens in {steps} steps written to {path}")
    }
}

/// A trace that is asked for.
pub struct Tracing<'a>(Option<(&'a Path, Recorder)>);

/// Refuses what cannot be traced before anything is loaded.
///
/// # Errors
/// A model without routed experts, a file that cannot be written.
pub fn check(path: Option<&Path>, spec: &ModelSpec) -> Result<(), CliError> {
    let Some(path) = path else { return Ok(()) };
    if spec.moe().is_none() {
        return Err(CliError::usage(
            "--trace: the model has no routed experts, so there is no routing to record",
        ));
    }
    Ok(Trace::check_destination(path)?)
}

impl<'a> Tracing<'a> {
    /// Of what `engine` will run, if a file is given.
    pub fn of(path: Option<&'a Path>, engine: &Engine) -> Result<Self, CliError> {
        let recorder = path.map(|_| Recorder::of(engine)).transpose()?.flatten();
        Ok(Self(path.zip(recorder)))
    }

    /// Begins to record; gives the file that it is for.
    pub fn begin(self, session: &mut Session) -> Option<&'a Path> {
        let (path, recorder) = self.0?;
        session.record(recorder);
        Some(path)
    }
}

/// Writes what `session` has recorded to `path`.
///
/// # Errors
/// When the file cannot be written.
pub fn save(path: Option<&Path>, session: &mut Session) -> Result<Option<TraceReport>, CliError> {
    let Some((path, trace)) = path.zip(session.recorded()) else {
        return Ok(None);
    };
    trace.save(path)?;
    Ok(Some(TraceReport {
        path: path.to_owned(),
        tokens: trace.tokens(),
        steps: trace.steps(),
    }))
}
