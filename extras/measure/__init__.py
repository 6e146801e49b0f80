"""What a run costs and would cost elsewhere: links, exposed communication, reports, sweeps, tables and figures."""
