//! `horizon eval`: logits at every position, and perplexity.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use horizon_runtime::engine::{Engine, Settings};
use horizon_runtime::eval::Perplexity;
use horizon_runtime::text::tokenizer;
use serde::Serialize;

use super::model;
use crate::args::{LogitsArgs, PerplexityArgs};
use crate::output::{CliError, Output, thousands};
use crate::resolve::{ModelPlace, engine_options, token_ids};

/// What `eval logits` reports.
#[derive(Serialize)]
struct LogitsReport<'a> {
    output: &'a Path,
    positions: usize,
    vocab: usize,
    tensors: Vec<String>,
    settings: &'a Settings,
}

/// Writes the logits at every position.
pub fn logits(args: LogitsArgs) -> Result<(), CliError> {
    let out = Output::new(args.out);
    let tokens = token_ids(&args.tokens)?;
    if tokens.is_empty() {
        return Err(CliError::usage("--tokens: there are none"));
    }
    let mut options = engine_options(&args.model.execution)?;
    let bar = out.progress();
    let source = model::open(&ModelPlace::of(args.model.model.as_deref()), &bar)?;
    let spec = source.spec();
    if let Some(token) = tokens.iter().find(|t| **t as usize >= spec.vocab) {
        return Err(CliError::usage(format!(
            "--tokens: {token} is outside the vocabulary of {}",
            spec.vocab
        )));
    }
    fits("--tokens", tokens.len(), options.context.unwrap_or(spec.context))?;
    options.context.get_or_insert(tokens.len());
    let mut engine = Engine::open(&source, &options, &bar).map_err(model::refused)?;
    bar.finish();
    engine
        .notes()
        .iter()
        .for_each(|n| out.note(&format!("note: {n}")));
    let output = engine.evaluator().sequence(&tokens, args.taps)?;
    output.write_safetensors(&args.output)?;
    let mut tensors = vec!["logits".to_string()];
    tensors.extend(output.taps.keys().map(ToString::to_string));
    let report = LogitsReport {
        output: &args.output,
        positions: output.positions,
        vocab: engine.spec().vocab,
        settings: engine.settings(),
        tensors,
    };
    out.result(&report, || {
        let (n, v, t) = (report.positions, report.vocab, report.tensors.len());
        format!("{}: logits [{n}, {v}], {t} tensors\n", args.output.display())
    })
}

/// What `eval perplexity` reports.
#[derive(Serialize)]
struct PerplexityReport<'a> {
    file: &'a Path,
    bytes: usize,
    #[serde(flatten)]
    result: Perplexity,
    settings: &'a Settings,
}

/// Reports the mean negative log likelihood of a text.
pub fn perplexity(args: PerplexityArgs) -> Result<(), CliError> {
    let out = Output::new(args.output);
    if args.window < 2 {
        return Err(CliError::usage(
            "--window: a window of fewer than 2 tokens predicts nothing",
        ));
    }
    let text = read_text(&args.file, args.bytes)?;
    let mut options = engine_options(&args.model.execution)?;
    let bar = out.progress();
    let source = model::open(&ModelPlace::of(args.model.model.as_deref()), &bar)?;
    fits(
        "--window",
        args.window,
        options.context.unwrap_or(source.spec().context),
    )?;
    options.context.get_or_insert(args.window);
    let ids = tokenizer(&source)?.encode(&text, false)?;
    let mut engine = Engine::open(&source, &options, &bar).map_err(model::refused)?;
    engine
        .notes()
        .iter()
        .for_each(|n| out.note(&format!("note: {n}")));
    bar.begin_count("evaluating", ids.len() as u64);
    let result = engine
        .evaluator()
        .perplexity(&ids, args.window, &mut |done| bar.set(done as u64))?;
    bar.finish();
    let report = PerplexityReport {
        file: &args.file,
        bytes: text.len(),
        result,
        settings: engine.settings(),
    };
    out.result(&report, || {
        format!(
            "{}: {} tokens, {} predicted in {} windows of {}\nnll {:.6} nats a token, perplexity {:.4}\n",
            args.file.display(),
            thousands(result.tokens as u64),
            thousands(result.predicted as u64),
            result.windows,
            result.window,
            result.nll,
            result.perplexity
        )
    })
}

fn fits(flag: &str, tokens: usize, context: usize) -> Result<(), CliError> {
    if tokens > context {
        return Err(CliError::failed(format!(
            "{flag}: {tokens} tokens do not fit the context of {context}"
        )));
    }
    Ok(())
}

/// Reads a UTF-8 file, or its first `most` bytes without a character that is cut off there.
fn read_text(path: &Path, most: Option<u64>) -> Result<String, CliError> {
    let failed = |what: String| CliError::failed(format!("{}: {what}", path.display()));
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(|e| failed(e.to_string()))?;
    file.take(most.unwrap_or(u64::MAX))
        .read_to_end(&mut bytes)
        .map_err(|e| failed(e.to_string()))?;
    let cut = most.is_some_and(|m| bytes.len() as u64 == m);
    match std::str::from_utf8(&bytes) {
        Ok(_) => {}
        // The bytes end within a character, which the limit may have cut.
        Err(e) if e.error_len().is_none() && cut => bytes.truncate(e.valid_up_to()),
        Err(e) => return Err(failed(format!("not UTF-8 text at byte {}", e.valid_up_to()))),
    }
    String::from_utf8(bytes).map_err(|e| failed(e.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_character_at_the_limit_is_dropped_and_one_within_is_an_error() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("t.txt");
        std::fs::write(&path, "añb").expect("writes");
        let read = |most| read_text(&path, most);
        assert_eq!(read(None).expect("utf-8"), "añb");
        assert_eq!(read(Some(2)).expect("cut"), "a");
        assert_eq!(read(Some(3)).expect("whole"), "añ");
        assert_eq!(read(Some(9)).expect("short"), "añb");
        std::fs::write(&path, b"a\xff\xffb").expect("writes");
        assert!(read(None).is_err() && read(Some(4)).is_err());
        std::fs::write(&path, b"a\xc3").expect("writes");
        assert!(read(None).is_err(), "the file itself ends within a character");
    }
}
