use super::*;

const SAMPLED: Sampling = Sampling {
    greedy: false,
    temperature: 1.0,
    top_k: 0,
    top_p: 1.0,
    min_p: 0.0,
    repetition_penalty: 1.0,
    seed: 7,
};

/// Probabilities of the tokens that may be drawn, by token id.
fn distribution(settings: Sampling, prompt: &[u32], logits: &[f32]) -> Vec<(u32, f64)> {
    let mut s = Sampler::new(settings, prompt).expect("sound settings");
    s.penalize(logits).expect("sound logits");
    s.filter();
    let total: f64 = s.candidates.iter().map(|c| c.weight).sum();
    s.candidates.iter().map(|c| (c.token, c.weight / total)).collect()
}

fn assert_distribution(got: &[(u32, f64)], want: &[(u32, f64)]) {
    assert_eq!(got.len(), want.len(), "{got:?} against {want:?}");
    for (g, w) in got.iter().zip(want) {
        assert!(g.0 == w.0 && (g.1 - w.1).abs() < 1e-6, "{got:?} against {want:?}");
    }
}

/// Logits whose softmax is `p`.
fn logits(p: &[f64]) -> Vec<f32> {
    p.iter().map(|p| p.ln() as f32).collect()
}

#[test]
fn plain_sampling_is_the_softmax() {
    let want = [(0, 0.5), (1, 0.25), (2, 0.125), (3, 0.125)];
    assert_distribution(
        &distribution(SAMPLED, &[], &logits(&[0.5, 0.25, 0.125, 0.125])),
        &want,
    );
}

#[test]
fn temperature_squares_probabilities_at_one_half() {
    // 0.6², 0.3², 0.1² = 0.36, 0.09, 0.01 of 0.46
    let got = distribution(
        Sampling {
            temperature: 0.5,
            ..SAMPLED
        },
        &[],
        &logits(&[0.6, 0.3, 0.1]),
    );
    assert_distribution(&got, &[(0, 0.36 / 0.46), (1, 0.09 / 0.46), (2, 0.01 / 0.46)]);
}

#[test]
fn top_k_keeps_the_ties_of_the_last() {
    let p = logits(&[0.1, 0.4, 0.2, 0.2, 0.1]);
    let top = |top_k| distribution(Sampling { top_k, ..SAMPLED }, &[], &p);
    assert_distribution(&top(1), &[(1, 1.0)]);
    assert_distribution(&top(2), &[(1, 0.5), (2, 0.25), (3, 0.25)]);
    assert_distribution(&top(3), &top(2));
    assert_eq!(top(9).len(), 5);
}

#[test]
fn top_p_keeps_the_smallest_set_that_reaches_p() {
    let p = logits(&[0.05, 0.5, 0.15, 0.3]);
    let top = |top_p| distribution(Sampling { top_p, ..SAMPLED }, &[], &p);
    assert_distribution(&top(0.0), &[(1, 1.0)]);
    assert_distribution(&top(0.45), &[(1, 1.0)]);
    assert_distribution(&top(0.55), &[(1, 0.625), (3, 0.375)]);
    assert_distribution(&top(0.9), &[(1, 0.5 / 0.95), (2, 0.15 / 0.95), (3, 0.3 / 0.95)]);
    assert_eq!(top(0.96).len(), 4);
}

#[test]
fn top_p_drops_the_highest_id_of_equals_first() {
    let four = distribution(
        Sampling {
            top_p: 0.6,
            ..SAMPLED
        },
        &[],
        &[1.0; 4],
    );
    assert_distribution(&four, &[(0, 1.0 / 3.0), (1, 1.0 / 3.0), (2, 1.0 / 3.0)]);
    let all_equal = distribution(
        Sampling {
            top_p: 0.0,
            ..SAMPLED
        },
        &[],
        &[1.0; 4],
    );
    assert_distribution(&all_equal, &[(0, 1.0)]);
}

#[test]
fn top_p_equals_the_plain_algorithm_on_many_distributions() {
    let mut rng = Pcg64::seed_from_u64(1);
    for case in 0..200 {
        let n = 1 + (rng.next_u64() % 60) as usize;
        let l: Vec<f32> = (0..n)
            .map(|_| (unit_interval(rng.next_u64()) * 12.0 - 6.0) as f32)
            .collect();
        let top_p = unit_interval(rng.next_u64()) as f32;
        let mut order: Vec<usize> = (0..n).collect();
        order.sort_by(|a, b| l[*a].total_cmp(&l[*b]).then(b.cmp(a)));
        let sum: f64 = l.iter().map(|v| f64::from(*v).exp()).sum();
        let mut passed = 0.0;
        let mut kept: Vec<u32> = Vec::new();
        for (rank, i) in order.iter().enumerate() {
            passed += f64::from(l[*i]).exp() / sum;
            if passed > 1.0 - f64::from(top_p) || rank == n - 1 {
                kept.push(u32::try_from(*i).expect("small"));
            }
        }
        kept.sort_unstable();
        let got: Vec<u32> = distribution(Sampling { top_p, ..SAMPLED }, &[], &l)
            .iter()
            .map(|c| c.0)
            .collect();
        assert_eq!(got, kept, "case {case}, top_p {top_p}, logits {l:?}");
    }
}

#[test]
fn min_p_is_relative_to_the_most_likely_token() {
    let p = logits(&[0.5, 0.3, 0.15, 0.05]);
    let min = |min_p| distribution(Sampling { min_p, ..SAMPLED }, &[], &p).len();
    assert_eq!(
        [
            min(0.0),
            min(0.09),
            min(0.11),
            min(0.29),
            min(0.31),
            min(0.61),
            min(1.0)
        ],
        [4, 4, 3, 3, 2, 1, 1]
    );
}

#[test]
fn filters_act_in_the_order_top_k_top_p_min_p_and_renormalise_between() {
    // Top-k 3 leaves 0.4 0.3 0.2 of 0.9; p = 0.75 then needs 0.4/0.9 + 0.3/0.9 = 0.778. Without top-k first,
    // the two would reach 0.7 only and the third would stay.
    let p = logits(&[0.4, 0.3, 0.2, 0.1]);
    let got = distribution(
        Sampling {
            top_k: 3,
            top_p: 0.75,
            ..SAMPLED
        },
        &[],
        &p,
    );
    assert_distribution(&got, &[(0, 4.0 / 7.0), (1, 3.0 / 7.0)]);
    assert_eq!(
        distribution(
            Sampling {
                top_p: 0.75,
                ..SAMPLED
            },
            &[],
            &p
        )
        .len(),
        3
    );
    // Temperature comes before the filters: squared, 0.16 0.09 0.04 0.01 of 0.30; min-p 0.3 keeps 0.5625 only.
    let got = distribution(
        Sampling {
            temperature: 0.5,
            min_p: 0.3,
            ..SAMPLED
        },
        &[],
        &p,
    );
    assert_distribution(&got, &[(0, 0.64), (1, 0.36)]);
    assert_eq!(
        distribution(
            Sampling {
                min_p: 0.3,
                ..SAMPLED
            },
            &[],
            &p
        )
        .len(),
        3
    );
}

#[test]
fn repetition_penalty_divides_positive_and_multiplies_negative_logits_once() {
    let settings = Sampling {
        repetition_penalty: 2.0,
        ..Sampling::default()
    };
    let mut s = Sampler::new(settings, &[0, 0, 3]).expect("sound");
    s.penalize(&[4.0, 3.0, 1.0, -1.0, 0.0]).expect("sound");
    assert_eq!(s.scores, [2.0, 3.0, 1.0, -2.0, 0.0]);
    // Greedy: 1 wins, is then penalised itself, and 0 wins at 2.0 against 1.5.
    assert_eq!(s.sample(&[4.0, 3.0, 1.0, -1.0, 0.0]), Ok(1));
    assert_eq!(s.sample(&[4.0, 3.0, 1.0, -1.0, 0.0]), Ok(0));
}

#[test]
fn greedy_takes_the_first_of_equals() {
    let mut s = Sampler::new(Sampling::default(), &[]).expect("sound");
    assert_eq!(s.sample(&[1.0, 5.0, 5.0, -2.0]), Ok(1));
    let zero = Sampling {
        temperature: 0.0,
        ..SAMPLED
    };
    assert_eq!(
        Sampler::new(zero, &[]).expect("sound").sample(&[1.0, 5.0, 5.0]),
        Ok(1)
    );
}

#[test]
fn frequencies_follow_the_distribution() {
    let p = [0.4, 0.3, 0.2, 0.07, 0.03];
    let l = logits(&p);
    let mut s = Sampler::new(SAMPLED, &[]).expect("sound");
    let n = 100_000u32;
    let mut counts = [0u32; 5];
    for _ in 0..n {
        counts[s.sample(&l).expect("sound") as usize] += 1;
    }
    // Chi-squared with 4 degrees of freedom: 18.5 is passed once in a thousand seeds, and the seed is fixed.
    let chi: f64 = counts
        .iter()
        .zip(p)
        .map(|(c, p)| (f64::from(*c) - f64::from(n) * p).powi(2) / (f64::from(n) * p))
        .sum();
    assert!(
        chi < 18.5,
        "chi-squared {chi}, counts {counts:?}, seed {}",
        SAMPLED.seed
    );
}

#[test]
fn a_seed_names_a_sequence_for_good() {
    // First outputs by a second implementation, written from the definitions of PCG-64 and `seed_from_u64`.
    let first = |seed| {
        let mut rng = Pcg64::seed_from_u64(seed);
        [rng.next_u64(), rng.next_u64()]
    };
    assert_eq!(first(0), [0x20ae_25da_d4e2_bc53, 0x58f9_38e1_2bbf_69fb]);
    assert_eq!(first(1), [0xd701_f5c8_2406_2d47, 0x046d_af9b_8aba_af57]);
    assert_eq!(first(42), [0x39fc_b970_a300_1809, 0x3d36_1897_2c55_d911]);
    let l: Vec<f32> = (0..32).map(|i| ((i * 7) % 13) as f32 * 0.25).collect();
    let tokens = |seed| {
        let mut s = Sampler::new(Sampling { seed, ..SAMPLED }, &[]).expect("sound");
        (0..12).map(|_| s.sample(&l).expect("sound")).collect::<Vec<_>>()
    };
    assert_eq!(tokens(42), tokens(42));
    assert_ne!(tokens(42), tokens(43));
}

#[test]
fn bad_logits_are_errors() {
    let mut s = Sampler::new(SAMPLED, &[]).expect("sound");
    let nan = s.sample(&[0.0, f32::NAN]);
    assert!(
        matches!(nan, Err(SampleError::NotFinite { token: 1, .. })),
        "{nan:?}"
    );
    assert_eq!(
        s.sample(&[f32::INFINITY, 0.0]),
        Err(SampleError::NotFinite {
            token: 0,
            value: f32::INFINITY
        })
    );
    assert_eq!(
        s.sample(&[f32::NEG_INFINITY; 3]),
        Err(SampleError::NothingPossible { vocab: 3 })
    );
    assert_eq!(s.sample(&[]), Err(SampleError::NothingPossible { vocab: 0 }));
    assert_eq!(s.sample(&[f32::NEG_INFINITY, 1.0]), Ok(1));
}

#[test]
fn extreme_settings_still_choose_the_most_likely_token() {
    let l = [3.0e38, 1.0, -3.0e38];
    for settings in [
        Sampling {
            temperature: 1e-30,
            ..SAMPLED
        },
        Sampling {
            repetition_penalty: 1e-30,
            ..SAMPLED
        },
        Sampling {
            top_p: 0.0,
            min_p: 1.0,
            top_k: 1,
            ..SAMPLED
        },
    ] {
        assert_eq!(
            Sampler::new(settings, &[0]).expect("sound").sample(&l),
            Ok(0),
            "{settings:?}"
        );
    }
}

#[test]
fn settings_out_of_range_are_named() {
    for (settings, name) in [
        (
            Sampling {
                temperature: -1.0,
                ..SAMPLED
            },
            "temperature",
        ),
        (
            Sampling {
                temperature: f32::NAN,
                ..SAMPLED
            },
            "temperature",
        ),
        (
            Sampling {
                top_p: 1.5,
                ..SAMPLED
            },
            "top-p",
        ),
        (
            Sampling {
                min_p: -0.1,
                ..SAMPLED
            },
            "min-p",
        ),
        (
            Sampling {
                repetition_penalty: 0.0,
                ..SAMPLED
            },
            "repetition-penalty",
        ),
    ] {
        assert_eq!(Sampler::new(settings, &[]).expect_err(name).name, name);
    }
}
