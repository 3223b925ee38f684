use std::cell::Cell;

use super::*;
use crate::scripted::{NoProvider, ScriptedModel, Steps};

/// Token `t` reads `<t>`, except that 10, 11, 12 … read a, b, c ….
struct Letters;

impl TextDecoder for Letters {
    fn push(&mut self, token: u32) -> Result<String, TextError> {
        Ok(match token {
            10..36 => char::from(b'a' + u8::try_from(token - 10).expect("below 26")).to_string(),
            _ => format!("<{token}>"),
        })
    }

    fn finish(&mut self) -> Result<String, TextError> {
        Ok("~".into())
    }
}

const CONTEXT: usize = 32;

fn session(script: &[(usize, u32)]) -> (Session, Steps) {
    let (model, steps) = ScriptedModel::new(64, CONTEXT, script);
    (wrap(model), steps)
}

fn wrap(model: ScriptedModel) -> Session {
    let limits = Limits {
        context: CONTEXT,
        model_context: 100,
        prefill_chunk: 4,
    };
    Session::new(Box::new(model), Arc::new(NoProvider), limits)
}

fn request(prompt: &[u32], max_tokens: usize) -> Request {
    Request {
        prompt: prompt.to_vec(),
        max_tokens: Some(max_tokens),
        ..Request::default()
    }
}

fn generate(session: &mut Session, request: &Request) -> Answer {
    session
        .generate(request, &mut Letters, &AtomicBool::new(false), &mut |_| {})
        .expect("generation succeeds")
}

#[test]
fn prefill_runs_in_chunks_and_decode_in_single_rows() {
    let (mut s, steps) = session(&[(5, 10), (6, 11), (7, 12)]);
    let answer = generate(&mut s, &request(&[1, 2, 3, 4, 5, 6], 3));
    assert_eq!(
        (answer.text.as_str(), answer.token_ids.as_slice()),
        ("abc~", [10, 11, 12].as_slice())
    );
    assert_eq!(answer.stop, StopReason::MaxTokens);
    // The last token is not run: nothing needs its logits.
    let seen = steps.lock().expect("no panic").clone();
    let want: [&[(usize, u32)]; 4] = [
        &[(0, 1), (1, 2), (2, 3), (3, 4)],
        &[(4, 5), (5, 6)],
        &[(6, 10)],
        &[(7, 11)],
    ];
    assert_eq!(seen, want);
    assert_eq!((answer.prefill.routed, answer.decode.routed), (6, 2));
}

#[test]
fn a_backend_chooses_the_token_where_no_logit_is_needed_and_only_there() {
    let greedy = request(&[1, 2, 3, 4, 5, 6], 4);
    let penalty = Request {
        sampling: Sampling {
            repetition_penalty: 1.5,
            ..Sampling::default()
        },
        ..greedy.clone()
    };
    let drawn = Request {
        sampling: Sampling {
            greedy: false,
            ..Sampling::default()
        },
        ..greedy.clone()
    };
    for (request, chosen) in [(greedy, true), (penalty, false), (drawn, false)] {
        let want = generate(&mut session(&[]).0, &request);
        let (model, asked) = ScriptedModel::new(64, CONTEXT, &[]).0.choosing();
        let answer = generate(&mut wrap(model), &request);
        assert_eq!(answer.token_ids, want.token_ids);
        let (prefill, decode) = ((Phase::Prefill, chosen), (Phase::Decode, chosen));
        let asked = asked.lock().expect("no panic").clone();
        assert_eq!(asked, [prefill, prefill, decode, decode, decode]);
    }
}

#[test]
fn no_token_of_a_backend_is_an_error_like_logits_that_are_not_finite() {
    let (model, _) = ScriptedModel::new(64, CONTEXT, &[(1, StepOutput::NO_TOKEN)])
        .0
        .choosing();
    let error = wrap(model)
        .generate(
            &request(&[1, 2], 4),
            &mut Letters,
            &AtomicBool::new(false),
            &mut |_| {},
        )
        .expect_err("nothing can be chosen");
    assert!(
        matches!(&error, GenerateError::Sample(SampleError::NoChoice)),
        "{error}"
    );
}

#[test]
fn text_reaches_the_sink_as_it_becomes_certain() {
    let (mut s, _) = session(&[(1, 10), (2, 11), (3, 12), (4, 13)]);
    let mut pieces = Vec::new();
    let r = Request {
        stop: vec!["bx".into()],
        ..request(&[1, 2], 4)
    };
    let answer = s
        .generate(&r, &mut Letters, &AtomicBool::new(false), &mut |t| {
            pieces.push(t.to_string());
        })
        .expect("generation succeeds");
    assert_eq!(pieces, ["a", "bc", "d", "~"]);
    assert_eq!(answer.text, "abcd~");
}

#[test]
fn an_eos_token_ends_the_answer_by_id_and_is_not_in_the_text() {
    let script = [(1, 10), (2, 40), (3, 11), (4, 41)];
    let with_eos = |eos: &[u32]| {
        let (mut s, _) = session(&script);
        let r = Request {
            eos: eos.to_vec(),
            ..request(&[1, 2], 4)
        };
        let a = generate(&mut s, &r);
        (a.text, a.token_ids, a.stop)
    };
    assert_eq!(with_eos(&[41, 40]), ("a~".into(), vec![10, 40], StopReason::Eos));
    assert_eq!(
        with_eos(&[41]),
        ("a<40>b~".into(), vec![10, 40, 11, 41], StopReason::Eos)
    );
    assert_eq!(
        with_eos(&[]),
        ("a<40>b<41>~".into(), vec![10, 40, 11, 41], StopReason::MaxTokens)
    );
}

#[test]
fn a_stop_string_across_tokens_ends_the_answer_before_it() {
    let (mut s, _) = session(&[(1, 10), (2, 11), (3, 12), (4, 13)]);
    let answer = generate(
        &mut s,
        &Request {
            stop: vec!["bc".into()],
            ..request(&[1, 2], 4)
        },
    );
    assert_eq!((answer.text.as_str(), answer.stop), ("a", StopReason::StopString));
    assert_eq!(answer.stop_string.as_deref(), Some("bc"));
    assert_eq!(answer.token_ids, [10, 11, 12]);
}

#[test]
fn the_context_is_a_limit_with_both_numbers() {
    let (mut s, steps) = session(&[]);
    let long = s.generate(
        &request(&[1; 33], 4),
        &mut Letters,
        &AtomicBool::new(false),
        &mut |_| {},
    );
    let message = long.expect_err("33 tokens do not fit 32 positions").to_string();
    assert!(
        message.contains("33 tokens") && message.contains("holds 32") && message.contains("100"),
        "{message}"
    );
    assert!(steps.lock().expect("no panic").is_empty(), "nothing may run");
    let answer = generate(&mut s, &request(&[1; 30], 9));
    assert_eq!(
        (answer.token_ids.len(), answer.stop),
        (2, StopReason::ContextFull)
    );
    let answer = generate(&mut s, &request(&[2; 32], 9));
    assert_eq!(
        (answer.token_ids.len(), answer.stop),
        (0, StopReason::ContextFull)
    );
}

#[test]
fn an_empty_prompt_is_refused() {
    let (mut s, _) = session(&[]);
    let e = s.generate(
        &request(&[], 4),
        &mut Letters,
        &AtomicBool::new(false),
        &mut |_| {},
    );
    assert!(matches!(e, Err(GenerateError::EmptyPrompt)));
}

#[test]
fn cancelling_keeps_what_was_said() {
    let (mut s, _) = session(&[]);
    let (cancel, pieces) = (AtomicBool::new(false), Cell::new(0));
    let answer = s
        .generate(&request(&[1, 2], 20), &mut Letters, &cancel, &mut |_| {
            pieces.set(pieces.get() + 1);
            cancel.store(pieces.get() == 3, Ordering::Relaxed);
        })
        .expect("cancelling is no error");
    assert_eq!((answer.token_ids.len(), answer.stop), (3, StopReason::Cancelled));
    let before = s.generate(
        &request(&[1, 2, 3], 20),
        &mut Letters,
        &AtomicBool::new(true),
        &mut |_| {},
    );
    let before = before.expect("cancelling is no error");
    assert_eq!((before.token_ids.len(), before.stop), (0, StopReason::Cancelled));
}

#[test]
fn a_reused_turn_equals_a_fresh_one_and_reuses_only_what_prefill_wrote() {
    let first = [1, 2, 3, 4, 5];
    let (mut s, steps) = session(&[]);
    let a = generate(&mut s, &request(&first, 4));
    let mut second = first.to_vec();
    second.extend(&a.token_ids);
    second.extend([7, 8]);
    steps.lock().expect("no panic").clear();
    let b = generate(&mut s, &request(&second, 6));
    assert_eq!(b.reused, first.len());
    assert_eq!(
        steps.lock().expect("no panic")[0][0].0,
        first.len(),
        "prefill starts after the first prompt"
    );
    let (mut fresh, _) = session(&[]);
    assert_eq!(generate(&mut fresh, &request(&second, 6)).token_ids, b.token_ids);
    // The same prompt again: all but its last token is kept.
    assert_eq!(generate(&mut s, &request(&second, 6)).reused, second.len() - 1);
    // A prompt that parts early keeps only the common beginning.
    let other = [1, 2, 9, 9, 9, 9];
    let c = generate(&mut s, &request(&other, 6));
    let (mut fresh, _) = session(&[]);
    assert_eq!(
        (c.reused, c.token_ids),
        (2, generate(&mut fresh, &request(&other, 6)).token_ids)
    );
}

#[test]
fn a_failed_or_cancelled_turn_leaves_a_session_that_answers_like_a_fresh_one() {
    let (model, _) = ScriptedModel::new(64, CONTEXT, &[]);
    let mut s = wrap(model.failing_at(9));
    let long: Vec<u32> = (1..=12).collect();
    let failed = s.generate(
        &request(&long, 4),
        &mut Letters,
        &AtomicBool::new(false),
        &mut |_| {},
    );
    assert!(matches!(failed, Err(GenerateError::Step(_))));
    let again = generate(&mut s, &request(&long, 4));
    let (mut fresh, _) = session(&[]);
    assert_eq!(again.reused, 8, "two chunks of four had been written");
    assert_eq!(
        again.token_ids,
        generate(&mut fresh, &request(&long, 4)).token_ids
    );
}

#[test]
fn zero_tokens_is_a_prefill() {
    let (mut s, _) = session(&[]);
    let answer = generate(&mut s, &request(&[1, 2, 3], 0));
    assert_eq!((answer.token_ids.len(), answer.stop), (0, StopReason::MaxTokens));
    assert_eq!(answer.prefill.routed, 3);
    assert_eq!(answer.decode_tokens_per_second(), None);
}
