def test_plot_takes_run_folders_and_folders_of_runs(run, train, folder, capsys):
    train("--seeds", 1, 2, "--quiet", steps=512)
    for argv in (["runs"], list((folder / "runs/RepeatPreviousEasy-v0").iterdir())):
        assert run("plot", *argv, "-o", "new.png") == 0
        (folder / "new.png").unlink()
    capsys.readouterr()
    assert run("plot", "runs", "--metric", "loss") == 2
    assert "no metric 'loss'" in capsys.readouterr().err
