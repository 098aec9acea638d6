use super::*;

fn process_info() -> ProcessInfo {
    ProcessInfo { temporary: "/tmp".into(), user: 7, hydra_proxy: Some((99, 1234)) }
}

fn parse_with(
    arguments: &ExplicitWorld,
    variables: &[(&str, &str)],
) -> Result<Option<ParsedWorld>, WorldError> {
    let variables = variables.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect();
    parse(arguments, &variables, &process_info())
}

fn world(variables: &[(&str, &str)]) -> World {
    parse_with(&ExplicitWorld::default(), variables).expect("is complete").expect("is a world").world
}

fn error(variables: &[(&str, &str)]) -> String {
    parse_with(&ExplicitWorld::default(), variables).expect_err("is wrong").to_string()
}

fn meets(world: &World) -> String {
    world.rendezvous.as_ref().expect("meets somewhere").to_string()
}

const PLEACH: [(&str, &str); 3] =
    [("PLEACH_RANK", "2"), ("PLEACH_WORLD_SIZE", "4"), ("PLEACH_RENDEZVOUS", "tcp://127.0.0.1:4000")];

const TORCHRUN: [(&str, &str); 5] = [
    ("RANK", "3"),
    ("WORLD_SIZE", "8"),
    ("LOCAL_RANK", "1"),
    ("MASTER_ADDR", "node-0"),
    ("MASTER_PORT", "29500"),
];

const OPEN_MPI: [(&str, &str); 6] = [
    ("OMPI_COMM_WORLD_RANK", "1"),
    ("OMPI_COMM_WORLD_SIZE", "2"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    ("PMIX_NAMESPACE", "1922170881"),
    ("PMIX_RANK", "1"),
];

const HYDRA: [(&str, &str); 4] =
    [("PMI_RANK", "1"), ("PMI_SIZE", "4"), ("MPI_LOCALRANKID", "1"), ("MPI_LOCALNRANKS", "4")];

const SRUN: [(&str, &str); 7] = [
    ("SLURM_PROCID", "5"),
    ("SLURM_NTASKS", "6"),
    ("SLURM_LOCALID", "2"),
    ("SLURM_STEP_NODELIST", "gpu[03-04]"),
    ("SLURM_STEP_NUM_NODES", "2"),
    ("SLURM_JOB_ID", "1000"),
    ("SLURM_STEP_ID", "3"),
];

fn but<'a>(variables: &[(&'a str, &'a str)], name: &'a str, value: &'a str) -> Vec<(&'a str, &'a str)> {
    let mut changed: Vec<_> = variables.iter().copied().filter(|(other, _)| *other != name).collect();
    changed.push((name, value));
    changed
}

#[test]
fn without_a_launcher_there_is_no_world() {
    assert!(parse_with(&ExplicitWorld::default(), &[("HOME", "/root")]).expect("is fine").is_none());
}

#[test]
fn each_launcher_says_rank_size_and_local_rank() {
    let cases = [
        (&PLEACH[..], Launcher::Pleach, 2, 4, None, "tcp://127.0.0.1:4000"),
        (&TORCHRUN, Launcher::Torchrun, 3, 8, Some(1), "tcp://node-0:29501"),
        (&OPEN_MPI, Launcher::OpenMpi, 1, 2, Some(1), "file:///tmp/pleach-7/openmpi-"),
        (&HYDRA, Launcher::Hydra, 1, 4, Some(1), "file:///tmp/pleach-7/hydra-99-1234"),
        (&SRUN, Launcher::Srun, 5, 6, Some(2), "tcp://gpu03:21003"),
    ];
    for (variables, launcher, rank, world_size, local_rank, place) in cases {
        let world = world(variables);
        assert_eq!((world.launcher, world.rank, world.world_size), (launcher, rank, world_size));
        assert_eq!(world.local_rank, local_rank, "{launcher}");
        assert!(meets(&world).starts_with(place), "{launcher}: {}", meets(&world));
    }
}

#[test]
fn arguments_come_before_variables_and_earlier_launchers_before_later_ones() {
    let all: Vec<_> = [&PLEACH[..], &TORCHRUN, &OPEN_MPI, &HYDRA, &SRUN].concat();
    let arguments = ExplicitWorld { rank: Some(0), world_size: Some(3), rendezvous: None };
    let found = parse_with(&arguments, &all).expect("is complete").expect("is a world").world;
    assert_eq!((found.launcher, found.rank, found.world_size), (Launcher::Arguments, 0, 3));
    assert_eq!(meets(&found), "tcp://127.0.0.1:4000", "what arguments leave open, PLEACH_* says");
    let order = [Launcher::Pleach, Launcher::Torchrun, Launcher::OpenMpi, Launcher::Hydra, Launcher::Srun];
    let sets: [&[(&str, &str)]; 5] = [&PLEACH, &TORCHRUN, &OPEN_MPI, &HYDRA, &SRUN];
    for (first, launcher) in order.iter().enumerate() {
        assert_eq!(world(&sets[first..].concat()).launcher, *launcher);
    }
}

#[test]
fn the_place_to_meet_may_come_from_pleach_rendezvous_under_every_launcher() {
    for variables in [&TORCHRUN[..], &OPEN_MPI, &HYDRA, &SRUN] {
        let world = world(&but(variables, "PLEACH_RENDEZVOUS", "tcp://127.0.0.1:77"));
        assert_eq!(meets(&world), "tcp://127.0.0.1:77", "{}", world.launcher);
    }
}

#[test]
fn ranks_of_mpirun_on_several_hosts_must_be_told_where_to_meet() {
    for variables in [but(&OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE", "1"), but(&HYDRA, "MPI_LOCALNRANKS", "2")]
    {
        assert!(error(&variables).contains("set PLEACH_RENDEZVOUS="), "{}", error(&variables));
    }
    let unknown = ProcessInfo { hydra_proxy: None, ..process_info() };
    let variables = HYDRA.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect();
    let error = parse(&ExplicitWorld::default(), &variables, &unknown).expect_err("no job is known");
    assert!(error.to_string().contains("PLEACH_RENDEZVOUS"), "{error}");
}

#[test]
fn a_world_of_one_needs_no_place_to_meet() {
    let world = world(&[("PMI_RANK", "0"), ("PMI_SIZE", "1")]);
    assert_eq!((world.world_size, &world.rendezvous), (1, &None));
}

#[test]
fn two_jobs_of_open_mpi_meet_in_different_folders() {
    let other = world(&but(&OPEN_MPI, "PMIX_NAMESPACE", "1922170882"));
    assert_ne!(meets(&world(&OPEN_MPI)), meets(&other));
}

#[test]
fn a_rank_outside_its_world_is_named_with_its_variable() {
    for (variables, name) in [
        (&PLEACH[..], "PLEACH_RANK"),
        (&TORCHRUN, "RANK"),
        (&OPEN_MPI, "OMPI_COMM_WORLD_RANK"),
        (&HYDRA, "PMI_RANK"),
        (&SRUN, "SLURM_PROCID"),
    ] {
        let text = error(&but(variables, name, "8"));
        assert!(text.contains(&format!("{name}=8 in a world of")), "{text}");
    }
    assert!(error(&but(&TORCHRUN, "LOCAL_RANK", "8")).contains("LOCAL_RANK=8 in a world of 8"));
    let arguments = ExplicitWorld { rank: Some(4), world_size: Some(4), rendezvous: None };
    let text = parse_with(&arguments, &[]).expect_err("is outside").to_string();
    assert_eq!(text, "rank outside the world: --rank=4 in a world of 4; ranks count from 0 to 3");
}

#[test]
fn what_is_no_number_is_shown_with_its_variable_and_range() {
    for value in ["x", "-1", "1.5", "0", "65537", "99999999999999999999"] {
        let text = error(&but(&PLEACH, "PLEACH_WORLD_SIZE", value));
        assert_eq!(text, format!("bad value: PLEACH_WORLD_SIZE='{value}'; set a number from 1 to 65536"));
    }
    for (variables, name) in
        [(&TORCHRUN[..], "MASTER_PORT"), (&TORCHRUN, "LOCAL_RANK"), (&OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE")]
    {
        assert!(error(&but(variables, name, "x")).contains(&format!("{name}='x'")));
    }
    let arguments = ExplicitWorld { rank: Some(0), world_size: Some(0), rendezvous: None };
    assert!(parse_with(&arguments, &[]).expect_err("is empty").to_string().contains("--world-size='0'"));
}

#[test]
fn half_of_a_pair_is_an_error_that_names_the_other_half() {
    assert!(error(&PLEACH[..1]).contains("PLEACH_RANK is given without PLEACH_WORLD_SIZE"));
    assert!(error(&PLEACH[1..]).contains("PLEACH_WORLD_SIZE is given without PLEACH_RANK"));
    assert!(error(&OPEN_MPI[..1]).contains("without OMPI_COMM_WORLD_SIZE"));
    assert!(error(&HYDRA[1..]).contains("without PMI_RANK"));
    assert!(error(&TORCHRUN[..4]).contains("MASTER_ADDR is given without MASTER_PORT"));
    assert!(error(&TORCHRUN[..2]).contains("MASTER_ADDR"));
    for (rank, world_size) in [(Some(0), None), (None, Some(2))] {
        let arguments = ExplicitWorld { rank, world_size, rendezvous: None };
        assert!(
            parse_with(&arguments, &[]).expect_err("is half").to_string().contains("give both or neither")
        );
    }
}

#[test]
fn leftovers_are_nobodys_rank() {
    // A batch script of Slurm, and a shell in which somebody has set a common word.
    for variables in
        [&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4")][..], &[("RANK", "3")], &[("WORLD_SIZE", "3")]]
    {
        assert!(
            parse_with(&ExplicitWorld::default(), variables).expect("is fine").is_none(),
            "{variables:?}"
        );
    }
    assert!(
        parse_with(&ExplicitWorld::default(), &[("PLEACH_RANK", ""), ("PMI_RANK", " ")])
            .expect("is fine")
            .is_none()
    );
}

#[test]
fn a_bad_address_names_its_variable_and_the_right_forms() {
    let text = error(&but(&PLEACH, "PLEACH_RENDEZVOUS", "localhost:4000"));
    assert!(text.contains("'localhost:4000'") && text.contains("PLEACH_RENDEZVOUS"), "{text}");
    assert!(error(&PLEACH[..2]).contains("PLEACH_RENDEZVOUS"));
}

#[test]
fn host_interface_and_secret_file_are_passed_on() {
    let mut variables = PLEACH.to_vec();
    variables.extend([("PLEACH_HOST", "a"), ("PLEACH_INTERFACE", "eth0"), ("PLEACH_SECRET_FILE", "/s")]);
    let found = parse_with(&ExplicitWorld::default(), &variables).expect("is complete").expect("is a world");
    assert_eq!(found.world.host.as_deref(), Some("a"));
    assert_eq!(found.world.interface.as_deref(), Some("eth0"));
    assert_eq!(found.secret_file.as_deref(), Some(Path::new("/s")));
    assert!(matches!(found.open(), Err(WorldError::Secret(SecretError::Read { .. }))));
}

#[test]
fn ranks_can_be_told_how_long_to_wait_for_each_other() {
    assert_eq!(world(&PLEACH).join_timeout, None);
    let told = |value| but(&TORCHRUN, "PLEACH_JOIN_TIMEOUT", value);
    assert_eq!(world(&told("5")).join_timeout, Some(Duration::from_secs(5)));
    for bad in ["0", "86401", "-1", "1.5", "soon"] {
        let text = error(&told(bad));
        assert!(
            text.contains(&format!("PLEACH_JOIN_TIMEOUT='{bad}'")) && text.contains("from 1 to 86400"),
            "{text}"
        );
    }
}

#[test]
fn ranks_can_be_told_when_to_connect() {
    assert_eq!(world(&PLEACH).connect, None);
    let told = |value| but(&TORCHRUN, "PLEACH_CONNECT", value);
    assert_eq!(world(&told("on-use")).connect, Some(Connect::OnUse));
    assert_eq!(world(&told("at-join")).connect, Some(Connect::AtJoin));
    for bad in ["use", "On-Use", "1"] {
        let text = error(&told(bad));
        assert_eq!(text, format!("bad value: PLEACH_CONNECT='{bad}'; set on-use or at-join"));
    }
    for (ranks, connect) in [(1, Connect::AtJoin), (15, Connect::AtJoin), (16, Connect::OnUse)] {
        assert_eq!(Connect::of_ranks(ranks), connect);
    }
}

#[test]
fn the_first_host_of_a_slurm_list() {
    for (list, first) in [
        ("node", Some("node")),
        ("a,b", Some("a")),
        ("gpu[03-07]", Some("gpu03")),
        ("gpu[3,5-7],x", Some("gpu3")),
        ("r[1-2]n[04-05]", Some("r1n04")),
        ("r[1-2]-ib,x", Some("r1-ib")),
        ("", None),
        ("gpu[", None),
        ("gpu[]", None),
    ] {
        assert_eq!(first_host(list).as_deref(), first, "{list}");
    }
}

#[test]
fn on_one_node_an_srun_step_meets_in_a_folder() {
    let world = world(&but(&SRUN, "SLURM_STEP_NUM_NODES", "1"));
    assert_eq!(meets(&world), "file:///tmp/pleach-7/srun-1000-3");
}
