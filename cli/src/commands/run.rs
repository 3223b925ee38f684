//! `horizon run`: one prompt, one answer.

use std::io::{self, IsTerminal, Read};
use std::path::Path;

use horizon_core::artifact::Progress;
use horizon_models::chat::{Message, RenderOptions};
use horizon_runtime::engine::limits;
use horizon_runtime::process::ResidentMemory;
use horizon_runtime::session::StopReason;
use horizon_runtime::text::TextFiles;
use serde::Serialize;

use super::answer::{AnswerReport, Answerer};
use super::floor::{Measured, Yardstick};
use super::model;
use super::trace::{self, TraceReport, Tracing};
use crate::args::{RunArgs, SpecialTokens};
use crate::output::{CliError, Output, write_stdout};
use crate::resolve::{ModelPlace, engine_options, generation};

/// The object that `--json` prints.
#[derive(Serialize)]
struct RunReport<'a> {
    #[serde(flatten)]
    answer: &'a AnswerReport<'a>,
    memory: ResidentMemory,
    /// With `--stats`.
    floor: &'a Measured,
    trace: Option<&'a TraceReport>,
    notes: &'a [String],
}

/// Generates an answer.
pub fn run(args: RunArgs) -> Result<(), CliError> {
    let out = Output::new(args.output);
    if args.system.is_some() && !args.chat {
        return Err(CliError::usage(
            "--system: only with --chat, which puts the text through the model's chat template",
        ));
    }
    let prompt = prompt(&args)?;
    let options = engine_options(&args.model.execution)?;
    // Before anything is loaded: what was typed must make sense by itself.
    generation(
        &args.generate,
        &horizon_models::generation::GenerationConfig::default(),
    )?;
    let bar = out.progress();
    let source = model::open(&ModelPlace::of(args.model.model.as_deref()), &bar)?;
    trace::check(args.trace.as_deref(), source.spec())?;
    let limits = limits(source.spec(), &options).map_err(model::refused)?;
    let prepare = |text: &TextFiles| {
        let plan = generation(&args.generate, &text.generation)?;
        let ids = encode(&args, text, &prompt)?;
        limits.check_prompt(&ids)?;
        Ok((plan, ids))
    };
    let (engine, text, (plan, prompt_ids)) = model::load(source, &options, &bar, prepare)?;
    if !args.chat && args.prompt.is_none() && prompt.ends_with('\n') {
        bar.note("the prompt ends with a line break, which the model sees");
    }
    let special_shown = args.special_tokens.unwrap_or(match args.chat {
        true => SpecialTokens::Hide,
        false => SpecialTokens::Show,
    }) == SpecialTokens::Show;
    let echo = args.echo || (!args.chat && !out.is_json() && io::stdout().is_terminal());
    if echo && !out.is_json() {
        write_stdout(&prompt)?;
    }
    let notes = engine.record();
    let yardstick = Yardstick::of(&engine);
    let tracing = Tracing::of(args.trace.as_deref(), &engine)?;
    let mut answerer = Answerer::new(engine, &text, plan, (args.chat, special_shown), out);
    let traced = tracing.begin(&mut answerer.session);
    let answer = answerer.generate(&prompt_ids, 0)?;
    let trace = trace::save(traced, &mut answerer.session)?;
    let report = answerer.report(&prompt_ids, &answer);
    let memory = ResidentMemory::now();
    let floor = Measured(if args.stats {
        yardstick.hold(answerer.settings(), &answer, prompt_ids.len())?
    } else {
        None
    });
    let object = RunReport {
        answer: &report,
        memory,
        floor: &floor,
        trace: trace.as_ref(),
        notes: &notes,
    };
    report.print(&object, &answer, answerer.seed(), out)?;
    if let Some(floor) = &floor.0 {
        out.note(&floor.line());
    }
    if let Some(trace) = &trace {
        out.note(&trace.line());
    }
    if answer.stop == StopReason::Cancelled {
        Err(CliError::Interrupted)
    } else {
        Ok(())
    }
}

/// The prompt's tokens.
fn encode(args: &RunArgs, text: &TextFiles, prompt: &str) -> Result<Vec<u32>, CliError> {
    if !args.chat {
        return Ok(text.tokenizer.encode(prompt, true)?);
    }
    let mut messages: Vec<Message> = args.system.iter().map(|s| Message::new("system", s)).collect();
    messages.push(Message::new("user", prompt));
    let rendered = text
        .chat_template()?
        .render(&messages, &RenderOptions::answer())?;
    // The template writes the special tokens itself.
    Ok(text.tokenizer.encode(&rendered, false)?)
}

/// The prompt, from the argument, the file or stdin: a raw one exactly as it is.
fn prompt(args: &RunArgs) -> Result<String, CliError> {
    let mut text = match (&args.prompt, &args.file) {
        (Some(prompt), _) => prompt.clone(),
        (None, Some(path)) if path != Path::new("-") => {
            let bytes = std::fs::read(path)
                .map_err(|e| CliError::failed(format!("--file {}: {e}", path.display())))?;
            utf8(bytes, &format!("--file {}", path.display()))?
        }
        (None, None) if io::stdin().is_terminal() => {
            return Err(CliError::usage(
                "there is no prompt: give it as an argument, with -f FILE, or on stdin",
            ));
        }
        (None, _) => {
            let mut bytes = Vec::new();
            io::stdin().lock().read_to_end(&mut bytes)?;
            utf8(bytes, "stdin")?
        }
    };
    if args.chat && args.prompt.is_none() {
        // What ends a line of a file or a pipe is no part of a message.
        text.truncate(
            text.strip_suffix('\n')
                .map_or(text.len(), |t| t.trim_end_matches('\r').len()),
        );
    }
    if text.is_empty() {
        return Err(CliError::usage(
            "the prompt is empty; there is nothing to continue",
        ));
    }
    Ok(text)
}

fn utf8(bytes: Vec<u8>, place: &str) -> Result<String, CliError> {
    String::from_utf8(bytes).map_err(|e| {
        CliError::failed(format!(
            "{place}: not UTF-8 text at byte {}",
            e.utf8_error().valid_up_to()
        ))
    })
}
