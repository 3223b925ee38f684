//! Opening a model: what `run`, `chat`, `inspect`, `eval` and `bench` share.

use horizon_core::artifact::Progress;
use horizon_models::demo;
use horizon_models::source::ModelSource;
use horizon_runtime::engine::{Engine, EngineOptions};
use horizon_runtime::text::TextFiles;

use crate::output::{Bar, CliError};
use crate::resolve::ModelPlace;

/// Opens the files of a model; from the hub after downloading what is missing.
///
/// # Errors
/// What is not there or cannot be used, named.
pub fn open(place: &ModelPlace, bar: &Bar) -> Result<ModelSource, CliError> {
    match place {
        ModelPlace::Embedded => {
            let demo = demo::embedded()?;
            Ok(ModelSource::in_memory(
                demo::EMBEDDED_NAME,
                demo.files,
                demo.safetensors,
            )?)
        }
        ModelPlace::Path(path) => Ok(ModelSource::open(path)?),
        ModelPlace::Hub(name) => {
            bar.note(&format!(
                "{name} is not a directory here; looking for it on the hub"
            ));
            Err(CliError::failed(format!("{name}: the hub is not there yet")))
        }
    }
}

/// Opens a model for text: weights and tokenizer are loaded at the same time. The source is closed afterwards.
///
/// # Errors
/// Of the weights, else of the tokenizer.
pub fn load(
    source: ModelSource,
    options: &EngineOptions,
    bar: &Bar,
) -> Result<(Engine, TextFiles), CliError> {
    let (engine, text) = std::thread::scope(|scope| {
        let text = scope.spawn(|| TextFiles::load(&source));
        (Engine::open(&source, options, bar), text.join())
    });
    bar.finish();
    let engine = engine?;
    let text = text.map_err(|_| CliError::failed("the tokenizer could not be loaded (it panicked)"))??;
    engine.notes().iter().for_each(|n| bar.note(n));
    Ok((engine, text))
}
