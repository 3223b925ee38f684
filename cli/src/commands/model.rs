//! Opening a model: what `run`, `chat`, `inspect`, `eval` and `bench` share.

use std::error::Error;
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use horizon_core::artifact::Progress;
use horizon_models::demo;
use horizon_models::hub::{self, HubError, HubSettings, RepoId};
use horizon_models::source::ModelSource;
use horizon_runtime::engine::{Engine, EngineError, EngineOptions, LoadedEngine};
use horizon_runtime::text::TextFiles;

use crate::args::hub_variable;
use crate::output::{Bar, CliError, bytes};
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
        ModelPlace::Hub(repo) => Ok(ModelSource::open(&download(repo, bar)?)?),
    }
}

/// Makes sure that a repository is in the hub's cache; its directory there.
fn download(repo: &RepoId, bar: &Bar) -> Result<PathBuf, CliError> {
    let settings = HubSettings::from_variables(hub_variable)?;
    let mut file = String::new();
    let fetched = hub::fetch(repo, &settings, &mut |p| {
        if file != p.file {
            p.file.clone_into(&mut file);
            bar.begin(&format!("{repo} {file}"), p.total_bytes.1);
        }
        bar.set(p.total_bytes.0);
    });
    let fetched = fetched.map_err(|source| NotFetched {
        repo: repo.to_string(),
        source,
    })?;
    bar.finish();
    if let Some(why) = &fetched.not_refreshed {
        bar.note(&format!(
            "{repo}: the hub cannot be reached ({why}); using commit {} from the cache",
            fetched.commit
        ));
    } else if fetched.fetched_bytes > 0 {
        let (size, dir) = (bytes(fetched.fetched_bytes), fetched.dir.display());
        bar.note(&format!(
            "{repo}: {size} downloaded, commit {}, {dir}",
            fetched.commit
        ));
    }
    Ok(fetched.dir)
}

/// A repository that is not there, where the user may have meant a directory.
#[derive(Debug)]
struct NotFetched {
    repo: String,
    source: HubError,
}

impl fmt::Display for NotFetched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: not a directory here, and not to be had from the hub: {}",
            self.repo, self.source
        )
    }
}

impl Error for NotFetched {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&self.source)
    }
}

/// Opens a model for text: while the weights are loaded, so are tokenizer and templates, and `prepare` looks at what is
/// to be asked. If anything is wrong there, the weights are not waited for. The source is closed afterwards.
///
/// # Errors
/// Of the text files or of `prepare`, else of the weights.
pub fn load<T: Send>(
    source: ModelSource,
    options: &EngineOptions,
    bar: &Bar,
    prepare: impl FnOnce(&TextFiles) -> Result<T, CliError> + Send,
) -> Result<(Engine, TextFiles, T), CliError> {
    let wanted = Wanted {
        bar,
        stopped: AtomicBool::new(false),
    };
    let (engine, text) = std::thread::scope(|scope| {
        let text = scope.spawn(|| {
            let text = TextFiles::load(&source).map_err(CliError::from);
            let done = text.and_then(|text| prepare(&text).map(|prepared| (text, prepared)));
            wanted.stopped.fetch_or(done.is_err(), Ordering::SeqCst);
            done
        });
        (LoadedEngine::load(&source, options, &wanted), text.join())
    });
    bar.finish();
    let (text, prepared) =
        text.map_err(|_| CliError::failed("the tokenizer could not be loaded (it panicked)"))??;
    let loaded = engine.map_err(refused)?;
    drop(source);
    let engine = loaded.admit().map_err(refused)?;
    engine.notes().iter().for_each(|n| bar.note(n));
    note_fit(&engine, bar);
    Ok((engine, text, prepared))
}

/// Work that is shown on a bar and can lose its purpose.
struct Wanted<'a> {
    bar: &'a Bar,
    stopped: AtomicBool,
}

impl Progress for Wanted<'_> {
    fn begin(&self, what: &str, bytes: u64) {
        self.bar.begin(what, bytes);
    }

    fn advance(&self, bytes: u64) {
        self.bar.advance(bytes);
    }

    fn note(&self, text: &str) {
        self.bar.note(text);
    }

    fn stopped(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }
}

/// Says which capacity a budget chose and why, if there is a budget.
pub fn note_fit(engine: &Engine, bar: &Bar) {
    if let Some(fit) = &engine.settings().budget {
        bar.note(&fit.lines().join("\n"));
    }
}

/// An engine that cannot be had; a cache that no machine could give is a mistake in the command line.
pub fn refused(error: EngineError) -> CliError {
    match error {
        EngineError::Residency(e) if e.is_mistake() => CliError::usage(e.to_string()),
        error => error.into(),
    }
}
